"""A keeper folder, a job and a run per test; no keeper may be left when the test ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.keeper.place import process_identity
from ckpt.run import Run

ROOT = Path(__file__).parent.parent.parent
GONE_S = 15.0


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = GONE_S) -> None:
    """Wait until something is so; fail the test, saying what, when it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def read_if_there(path: Path) -> str:
    """A file's text; "" when it has gone meanwhile."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def is_identity(text: str) -> bool:
    """Whether the process that a lock file names is alive."""
    return text != "" and process_identity(int(text.partition(".")[0])) == text


def is_alive(pid: int) -> bool:
    """Whether there is such a process, zombies not counted."""
    return process_identity(pid) != ""


class TrainerError(Exception):
    """What the process answered with an error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Trainer:
    """One rank in a process of its own."""

    def __init__(self, rank: int, run: str, env: dict[str, str]) -> None:
        self.rank = rank
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.keeper.rank_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **env},
        )  # fmt: skip
        self.keeper_pid = 0

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def send(self, do: str, **arguments: Any) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """What came of it; raises TrainerError."""
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise TrainerError(answer["error"], answer["message"])
        return answer["ok"]

    def do(self, do: str, **arguments: Any) -> Any:
        """Have it do something, and wait."""
        self.send(do, **arguments)
        return self.answer()

    def connect(self) -> Trainer:
        """Connect to the keeper."""
        self.keeper_pid = self.do("connect", rank=self.rank)
        return self

    def save(self, step: int, save: int | None = None, **options: Any) -> None:
        """Stage a step."""
        self.do("save", run=self.run, step=step, save=save if save is not None else step, **options)

    def hand_over(self, step: int, **options: Any) -> None:
        """The same to a store that fails, maybe before it is staged: ``wait`` tells."""
        self.do("hand_over", run=self.run, step=step, save=step, **options)

    def wait(self, save: int) -> dict[str, Any]:
        """Wait until it is committed."""
        result: dict[str, Any] = self.do("wait", save=save)
        return result

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let the process end by itself, without bye."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait(30)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this test's keepers; fails the test when one is left."""
    with tempfile.TemporaryDirectory(prefix="ckpt-keeper-") as above:
        monkeypatch.setenv("XDG_RUNTIME_DIR", above)
        monkeypatch.setenv("CKPT_JOB", above)
        monkeypatch.setenv("CKPT_LINGER_S", "0.2")
        place = Path(above, "ckpt")
        keepers: set[str] = set()
        yield place
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            keepers = {text for path in place.glob("*.lock") if is_identity(text := read_if_there(path))}
            if not keepers:
                break
            time.sleep(0.01)
        for identity in keepers:
            os.kill(int(identity.partition(".")[0]), signal.SIGKILL)
        assert not keepers, f"keepers left behind: {keepers}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run that has a writer."""
    run = Run.open(tmp_path / "run")
    run.open_writer(job="test", world=1, resumed_from=None)
    return run.url


@pytest.fixture
def trainers(folder: Path, url: str) -> Iterator[Callable[..., Trainer]]:
    """Makes connected trainers, ``trainers(rank, **environment)``; ends them after the test."""
    made: list[Trainer] = []

    def make(rank: int, run: str = url, **env: str) -> Trainer:
        trainer = Trainer(rank, run, env)
        made.append(trainer)
        return trainer.connect()

    yield make
    for trainer in made:
        trainer.end()
    for pid in {trainer.keeper_pid for trainer in made}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # nobody comes back: do not linger
