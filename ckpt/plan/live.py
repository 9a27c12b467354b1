"""Which committed attempts are live, and why the others are not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ckpt.format.commit import Attempt
from ckpt.format.writer import Writer

LIVE, SUPERSEDED, ABANDONED = "live", "superseded", "abandoned"


class Cutoff(msgspec.Struct, frozen=True):
    """A writer's steps after ``step`` are not live, because writer ``by`` went on from there (None: no limit)."""

    step: int | None
    by: Writer | None

    def hides(self, step: int) -> bool:
        """Whether a step of this number is beyond the cutoff."""
        return self.step is not None and step > self.step


def cutoffs(writers: Sequence[Writer]) -> dict[int, Cutoff]:
    """Writer number -> cutoff: walk newest first; each writer lowers it to what it resumed from."""
    result: dict[int, Cutoff] = {}
    current = Cutoff(None, None)
    for writer in sorted(writers, key=lambda w: w.number, reverse=True):
        result[writer.number] = current
        resumed_from = -1 if writer.resumed_from is None else writer.resumed_from
        if current.step is None or resumed_from < current.step:
            current = Cutoff(resumed_from, writer)
    return result


def classify(writers: Sequence[Writer], committed: Iterable[Attempt]) -> dict[Attempt, tuple[str, str]]:
    """Attempt -> (state, why) for attempts whose COMMIT is readable."""
    limits = cutoffs(writers)
    states: dict[Attempt, tuple[str, str]] = {}
    newest: dict[int, Attempt] = {}  # step -> the live attempt
    for attempt in sorted(committed, key=lambda a: (a.step, a.writer, a.save), reverse=True):
        limit = limits.get(attempt.writer)
        if limit is None:
            states[attempt] = (ABANDONED, f"writer {attempt.writer} has no record")
        elif limit.hides(attempt.step):
            states[attempt] = (ABANDONED, f"{_went_on(limit)}")
        elif attempt.step in newest:
            states[attempt] = (SUPERSEDED, f"saved again as {newest[attempt.step].label}")
        else:
            newest[attempt.step] = attempt
            states[attempt] = (LIVE, "")
    return states


def _went_on(limit: Cutoff) -> str:
    writer = limit.by
    if writer is None:  # a cutoff with a step always has its writer
        return ""
    start = "started anew" if writer.resumed_from is None else f"went on from step {writer.resumed_from}"
    verb = "rolled back to" if writer.world == 0 else "went on from"
    start = start.replace("went on from", verb)
    return f"writer {writer.number} ({writer.job} on {writer.host}) {start}"


def candidates(writers: Sequence[Writer], attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts that are live if their COMMIT is there: newest step first, and of one step the newest attempt first."""
    limits = cutoffs(writers)
    visible = [a for a in attempts if a.writer in limits and not limits[a.writer].hides(a.step)]
    return sorted(visible, key=lambda a: (a.step, a.writer, a.save), reverse=True)
