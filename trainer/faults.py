"""Faults made on purpose, so that a person can watch the run survive them.

One rule keeps a demonstration from killing itself for ever: a fault fires only in a run that restored nothing.
The job that is started again finds a committed step, restores it, and passes the fatal step unharmed, with the
very same command line. That needs a committed step before the fault, which is why it is refused earlier.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["Kill"]


@dataclass(frozen=True)
class Kill:
    """Rank ``rank`` dies by SIGKILL at the end of step ``step``'s body: after its optimizer step, before its save."""

    rank: int
    step: int

    def due(self, rank: int, step: int, restored_step: int | None) -> bool:
        """Whether this rank dies now; never in a run that went on from a committed step."""
        return restored_step is None and rank == self.rank and step == self.step

    def fire(self) -> NoReturn:
        """End this process as a lost machine would: no handler runs, nothing is flushed or closed."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process outlived SIGKILL")  # for the type checker: never reached
