"""A save under way, as its caller sees it."""

from __future__ import annotations

import msgspec

from ckpt.errors import CkptError
from ckpt.format.commit import Attempt
from ckpt.keeper.client import PendingTask
from ckpt.snapshot.overlap import Overlap


class SaveReport(msgspec.Struct, frozen=True):
    """What a committed save cost: this rank's bytes and seconds."""

    step: int
    attempt: str
    nbytes: int  # written by this rank
    stall_s: float  # how long it kept the caller: in save(), and in an optimizer's step that had to wait
    write_s: float  # from the begin of the copy until this rank's bytes were durable
    commit_s: float  # from staged to committed


class PendingSave:
    """A save under way. It needs no further care: once staged, the keeper finishes it even if this process dies."""

    def __init__(self, step: int, attempt: Attempt, call_s: float, task: PendingTask, overlap: Overlap | None) -> None:
        self.step = step
        self.attempt = attempt.label
        self.told = False  # whether its error was raised to the caller
        self._call_s = call_s
        self._task = task
        self._overlap = overlap

    @property
    def stall_s(self) -> float:
        """Seconds that it has kept the caller: in save(), and with ``overlap`` in the optimizer's next step."""
        return self._call_s + (0.0 if self._overlap is None else self._overlap.waited_s)

    @property
    def staged(self) -> bool:
        """Whether the keeper has the snapshot: from then on a dead trainer loses nothing."""
        return self._task.staged

    @property
    def committed(self) -> bool:
        """Whether the step exists."""
        return self._task.done and self._task.error is None

    @property
    def done(self) -> bool:
        """Whether it has ended, committed or failed."""
        return self._task.done

    def wait_copied(self) -> None:
        """Wait until nothing of the state is read any more: it may be changed freely then. At once without overlap."""
        if self._overlap is not None:
            self._overlap.wait()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the step is committed. Raises what made the save fail, or TimeoutError."""
        try:
            done = self._task.wait(timeout_s)
        except CkptError:
            self.told = True
            raise
        return SaveReport(self.step, self.attempt, done.nbytes_written, self.stall_s, done.write_s, done.commit_s)

    @property
    def error(self) -> CkptError | None:
        """What made it fail, once it has."""
        return self._task.error if self._task.done else None
