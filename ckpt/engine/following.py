"""The saves of one session that are under way, or have ended in a way that somebody must still hear of."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ckpt.engine.failures import WARN, Failures, survivable
from ckpt.engine.options import SaveOptions
from ckpt.engine.pending import PendingSave, SaveReport
from ckpt.errors import CkptError, FencedError, error_from_kind
from ckpt.run import Run

DRAIN_TIMEOUT_S = 1800.0


class Following:
    """``note_alarms`` is called when it is known what became of saves; ``rank`` 0 speaks for all."""

    def __init__(self, run: Run, rank: int, note_alarms: Callable[[list[PendingSave]], None]) -> None:
        self.pending: list[PendingSave] = []
        self.failures = Failures(rank)
        self.fenced: FencedError | None = None  # stands until the group has loaded again
        self._run = run
        self._rank = rank
        self._note_alarms = note_alarms
        self._standing: CkptError | None = None  # what an earlier save left to be raised

    def keep(self, pending: PendingSave) -> None:
        """Remember a save until it is over, and has been told if it failed."""
        pending.tell_alarms = lambda: self._note_alarms(self.pending)
        self.failures.note([*self.pending, pending])
        self._note_alarms(self.pending)
        self._tell_warnings()
        self.pending = [p for p in self.pending if not p.done or (p.error is not None and not p.told)] + [pending]

    def _tell_warnings(self) -> None:
        for pending in self.pending if self._rank == 0 else ():
            pending.tell_warnings()

    def note_failures(self) -> None:
        """List, and say, which saves have failed since the last time."""
        self.failures.note(self.pending)

    def may_survive(self, error: CkptError, options: SaveOptions) -> bool:
        """Whether training goes on after a save that could not even begin for this error."""
        return options.on_error == WARN and error is not self._standing and survivable(error, told_by_keeper=False)

    def wait_copied(self) -> None:
        """Wait until no save reads the state any more: from then on anyone may change it."""
        for pending in self.pending:
            pending.wait_copied()

    def loaded(self) -> bool:
        """The group has loaded: it may write again. Whether somebody else held the run before."""
        fenced = self.fenced is not None or any(isinstance(p.error, FencedError) for p in self.pending)
        self.fenced = None
        return fenced

    def raise_standing(self, *, has_writer: bool) -> None:
        """Raise what keeps the next save from being made: an error nobody was told of, or that the run is held."""
        self.raise_untold(has_writer=has_writer)
        if self.fenced is not None:
            raise FencedError(f"{self.fenced}; load from the run before saving to it again")

    def raise_untold(self, *, has_writer: bool) -> None:
        """Raise the error of an earlier save that nobody was told of: no failure is silent."""
        self.failures.note(self.pending)
        for pending in self.pending:
            error = pending.error
            if isinstance(error, FencedError) and has_writer:  # else the group has loaded since
                self.fenced = error
            if error is not None and not pending.told:
                pending.told = True
                self._standing = _of_earlier(pending, error)
                raise self._standing from error

    def drain(self, timeout_s: float, *, has_writer: bool) -> SaveReport | None:
        """Wait for every save under way; raises the first that failed and was not got over. Returns the last report."""
        deadline = time.monotonic() + timeout_s
        report = None
        for pending in self.pending:
            if pending.error is None:
                was_told = pending.told
                try:
                    report = pending.result(max(0.0, deadline - time.monotonic()))
                except CkptError as error:
                    self.failures.note(self.pending)
                    survived = pending.on_error == WARN and survivable(error, told_by_keeper=True)
                    if not was_told and not survived:
                        raise
        self._tell_warnings()
        self.raise_untold(has_writer=has_writer)
        return report

    def wait_for(self, pending: PendingSave) -> None:
        """Wait until it is committed. Raises what made it fail, unless that may be survived."""
        try:
            pending.result()
        except CkptError as error:
            self.failures.note([*self.pending, pending])
            if pending.on_error != WARN or not survivable(error, told_by_keeper=True):
                raise

    def say_where(self, run: str = "") -> None:
        """Say on standard error which step of ``run`` is the newest, and how many saves failed. Never raises."""
        failed = self.failures.summary()
        if self._rank != 0:
            return
        try:
            newest = next((s.attempt.step for s in self._run.live_steps() if s.commit is not None), None)
            text = "no step is committed" if newest is None else f"the newest committed step is {newest}"
        except CkptError as error:
            text = f"which step is the newest cannot be told: {error}"
        print(f"ckpt: {failed}{', ' if failed else ''}{text} in {run or self._run.url}", file=sys.stderr)


def _of_earlier(pending: PendingSave, error: CkptError) -> CkptError:
    told = error_from_kind(type(error).__name__, f"the save of step {pending.step} failed: {error}")
    if told.exit_code != error.exit_code:
        told.exit_code = error.exit_code
    return told
