"""A save under way, as its caller sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from ckpt.errors import CkptError, RankError
from ckpt.format.alarms import Alarm
from ckpt.format.commit import Attempt
from ckpt.keeper.client import PendingTask, SaveResult
from ckpt.snapshot.overlap import Overlap


class SaveReport(msgspec.Struct, frozen=True):
    """What a committed save cost: this rank's bytes and seconds."""

    step: int
    attempt: str
    nbytes: int  # written by this rank
    stall_s: float  # how long it kept the caller: in save(), and in an optimizer's step that had to wait
    write_s: float  # from the begin of the copy until this rank's bytes were durable
    commit_s: float  # from staged to committed
    alarms: tuple[Alarm, ...] = ()  # what looked wrong with the state, over all ranks
    warnings: tuple[str, ...] = ()  # what went wrong without harming the step: old steps that could not be deleted


class _Refused:
    """In a PendingTask's place where no keeper ever had the task."""

    staged = False
    done = True

    def __init__(self, error: CkptError) -> None:
        self.error = error
        self.at_fault = not isinstance(error, RankError)

    def wait(self, _timeout_s: float | None) -> SaveResult:
        """Raises the error."""
        raise self.error


class PendingSave:
    """A save under way. It needs no further care: once staged, the keeper finishes it even if this process dies.

    With ``on_error="warn"`` it may have failed already: ``error`` says why.
    """

    def __init__(
        self,
        step: int,
        attempt: Attempt | None,
        call_s: float,
        task: PendingTask | _Refused,
        overlap: Overlap | None,
        on_error: str = "raise",
    ) -> None:
        self.step = step
        self.attempt = "" if attempt is None else attempt.label  # "w7.3"; "" when it failed before it had a number
        self.on_error = on_error
        self.told = False  # whether its error was raised to the caller, or was said and may be survived
        self.noted = False  # whether its error is among those that are counted
        self.alarms_told = False
        self.tell_alarms: Callable[[], None] = lambda: None  # called when it is known what became of it
        self._warned = False
        self._call_s = call_s
        self._task = task
        self._overlap = overlap

    @classmethod
    def failed(cls, step: int, attempt: Attempt | None, call_s: float, error: CkptError, on_error: str) -> PendingSave:
        """One that failed before a keeper had it."""
        return cls(step, attempt, call_s, _Refused(error), None, on_error)

    @property
    def at_fault(self) -> bool:
        """Whether it failed by this rank's own part."""
        return self._task.at_fault

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
        self.tell_alarms()
        return SaveReport(
            step=self.step,
            attempt=self.attempt,
            nbytes=done.nbytes_written,
            stall_s=self.stall_s,
            write_s=done.write_s,
            commit_s=done.commit_s,
            alarms=done.alarms,
            warnings=done.warnings,
        )

    def tell_warnings(self) -> None:
        """Say on standard error, once, what went wrong beside a step that is committed."""
        if self.committed and not self._warned:
            self._warned = True
            for warning in self._task.wait(None).warnings:
                print(f"ckpt: step {self.step}: {warning}", file=sys.stderr)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What looked wrong with the state, over all ranks; () until the step is committed."""
        return self._task.wait(None).alarms if self.committed else ()

    @property
    def error(self) -> CkptError | None:
        """What made it fail, once it has."""
        return self._task.error if self._task.done else None
