"""A rank's process that does what its test tells it, one thing after the other."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol


class Member:
    """A rank's process, as its test sees it: ``main(pipe, files, rank, *arguments)``, begun at once."""

    def __init__(
        self, context: ForkServerContext, main: Callable[..., None], files: str, rank: int, *arguments: Any
    ) -> None:
        self.rank = rank
        self._stderr = Path(f"{files}.stderr-{rank}")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, files, rank, *arguments))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def send(self, name: str, *arguments: Any) -> None:
        """Have it do something."""
        self._pipe.send((name, arguments))

    def stderr(self) -> str:
        """What it has said so far."""
        return self._stderr.read_text() if self._stderr.exists() else ""


class Killable(Protocol):
    """A job."""

    def kill(self) -> object:
        """End all of its ranks."""


def leave_nothing(jobs: Iterable[Killable], keepers: Callable[[], Iterable[int]], folder: Path) -> None:
    """End what a test has started: jobs, then the keepers that there are; and the folder, since runs are large."""
    for job in jobs:
        job.kill()
    for pid in keepers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
