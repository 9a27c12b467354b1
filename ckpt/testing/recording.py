"""A store that writes down what is done with it, in this process and, through a log file, in others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, unquote

from ckpt.store.base import Store
from ckpt.testing.wrapped import Tally, WrappedStore

T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """One operation that ended. Times are of CLOCK_MONOTONIC, the same for all processes of a machine."""

    op: str  # a name of READING or MUTATING
    key: str
    nbytes: int  # moved; for close and abort those of the whole sink
    start_ns: int
    end_ns: int
    outcome: str  # "ok", or the name of the error's class
    pid: int

    def line(self) -> str:
        """``op key nbytes start_ns end_ns outcome pid``, the key percent-encoded but for its slashes."""
        key = quote(self.key, errors="surrogatepass") or "."
        return f"{self.op} {key} {self.nbytes} {self.start_ns} {self.end_ns} {self.outcome} {self.pid}\n"


class RecordingStore(WrappedStore):
    """Keeps every matching operation in ``done``, in the order in which they ended.

    ``log`` is a file that each gets a line in, appended at once, so that lines of several processes stand in it one
    after the other. An operation is written down when it ends; where the order of two matters, compare ``end_ns`` of
    the one that must be first with ``start_ns`` of the other.
    """

    def __init__(
        self,
        inner: Store,
        *,
        log: str | os.PathLike[str] | None = None,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
    ) -> None:
        super().__init__(inner, match=match, operation=operation, tally=tally)
        self.done: list[Operation] = []
        self._log = log

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:
        """Calls, and writes down what came of it."""
        start_ns = time.monotonic_ns()
        outcome = "ok"
        try:
            result = call()
            if isinstance(result, bytes):  # get
                nbytes = len(result)
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            done = Operation(operation, key, nbytes, start_ns, time.monotonic_ns(), outcome, os.getpid())
            self.done.append(done)
            if self._log is not None:
                append_line(self._log, done.line())
        return result


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append in one write, which no other process's line can fall into."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_log(path: str | os.PathLike[str]) -> list[Operation]:
    """What RecordingStores have appended to ``path``, in order; [] when there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        op, key, nbytes, start_ns, end_ns, outcome, pid = line.split(" ")
        key = "" if key == "." else unquote(key, errors="surrogatepass")
        found.append(Operation(op, key, int(nbytes), int(start_ns), int(end_ns), outcome, int(pid)))
    return found
