"""Saves that did not become steps: which of them may be survived, and how each is told."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from ckpt.engine.pending import PendingSave
from ckpt.errors import CkptError, KeeperError, RankError, SaveFailedError, StoreError

RAISE, WARN = "raise", "warn"
ON_ERROR = (RAISE, WARN)

# Another rank's failure has the exit code of its cause, so that all ranks decide alike. What is not here (somebody else
# holds the run, a state that cannot be saved, a peer that is dead) training cannot get past by going on.
_SURVIVABLE = frozenset(kind.exit_code for kind in (StoreError, SaveFailedError, KeeperError))


class FailedSave(msgspec.Struct, frozen=True):
    """A save that did not become a step, in ``Checkpointer.failed_saves``."""

    step: int
    attempt: str  # "" when it failed before it had a number
    error: CkptError


def survivable(error: CkptError, *, told_by_keeper: bool) -> bool:
    """Whether training may go on after it: storage or a keeper failed, this rank's or another's.

    ``told_by_keeper``: what became of a save. Only then is another rank's end an error of that save, and not of ours.
    """
    return error.exit_code in _SURVIVABLE or (told_by_keeper and error.exit_code == RankError.exit_code)


class Failures:
    """One session's. ``tried`` counts all its saves."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tried = 0
        self.failed: list[FailedSave] = []
        self.summarized = 0  # how many of them somebody was told the number of

    def note(self, pendings: Iterable[PendingSave]) -> None:
        """List those that have failed; one that may be survived is said aloud, and is told thereby."""
        for pending in pendings:
            error = pending.error
            if error is None or pending.noted:
                continue
            pending.noted = True
            self.failed.append(FailedSave(pending.step, pending.attempt, error))
            if pending.on_error == WARN and survivable(error, told_by_keeper=True):
                pending.told = True
                if self._rank == 0 or pending.at_fault:
                    # On standard error and nowhere else: a training script may have no logging of its own.
                    print(f"ckpt: step {pending.step} was not saved, training goes on: {error}", file=sys.stderr)

    def summary(self) -> str:
        """``2 of 10 saves failed``; "" when none did."""
        self.summarized = len(self.failed)
        return f"{len(self.failed)} of {self.tried} saves failed" if self.failed else ""
