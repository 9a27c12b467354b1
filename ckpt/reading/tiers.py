"""A run with other roots that hold copies of its steps, from which a COMMIT may come that is not right here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckpt.errors import BadInputError, CkptError, DamagedError, NotFoundError, StoreError, error_from_kind
from ckpt.format.commit import Attempt, Commit
from ckpt.run import Run
from ckpt.store.base import Store

Url = str | os.PathLike[str]


class TieredRun(Run):
    """A run and its tiers. A tier's COMMIT counts when the writer's record is the same here, so it is of this run."""

    def __init__(self, store: Store, tiers: Sequence[Run]) -> None:
        super().__init__(store)
        self.tiers = tuple(tiers)
        self.commits_from: dict[Attempt, str] = {}  # COMMITs that came from a tier, and from which
        self._refusals: dict[tuple[str, int], str | None] = {}

    def attempts(self) -> list[Attempt]:
        """Those of the tiers too, as far as their writers are writers of this run."""
        found = set(super().attempts())
        for tier in self.tiers:
            try:
                found.update(attempt for attempt in tier.attempts() if self.refusal(tier, attempt.writer) is None)
            except CkptError:  # a tier that is away: whoever needs its bytes is told
                continue
        return sorted(found)

    def read_commit(self, attempt: Attempt) -> Commit:
        """The COMMIT here, else that of the first tier that has it right."""
        try:
            return super().read_commit(attempt)
        except (NotFoundError, DamagedError, StoreError) as error:
            tried = []
            for tier in self.tiers:
                try:
                    why = self.refusal(tier, attempt.writer)
                    if why is None:
                        commit = tier.read_commit(attempt)
                        self.commits_from[attempt] = tier.url
                        return commit
                except CkptError as failure:
                    why = str(failure)
                tried.append(why)
            raise with_tried(error, tried) from error.__cause__

    def refusal(self, tier: Run, number: int) -> str | None:
        """Why nothing that writer ``number`` wrote is taken from ``tier``; None when it is the same writer there."""
        key = (tier.url, number)
        if key not in self._refusals:
            try:
                here, there = self.writer(number), tier.writer(number)
            except NotFoundError as error:
                self._refusals[key] = f"{tier.url}: writer {number} is not on both sides ({error})"
            else:
                same = here == there
                self._refusals[key] = (
                    None if same else f"{tier.url}: its writer {number} is another one, of another run"
                )
        return self._refusals[key]


def tiered(run: Run, tiers: Sequence[Url], within: Callable[[Store], Store] = lambda store: store) -> Run:
    """``run`` with these tiers; itself when there are none. BadInputError for a tier that no store takes.

    ``within`` gives the store through which a tier's own is used.
    """
    if isinstance(tiers, str | os.PathLike):
        raise BadInputError(f"tiers={os.fspath(tiers)!r}: give a list of roots, as tiers=[{os.fspath(tiers)!r}]")
    others = [Run(within(other.store)) for other in map(Run.open, tiers) if other.url != run.url]
    return TieredRun(run.store, others) if others else run


def with_tried(error: CkptError, tried: Sequence[str]) -> CkptError:
    """The error, with what was tried instead, in one sentence; itself when nothing was."""
    if not tried:
        return error
    return error_from_kind(type(error).__name__, f"{error}; nothing else has it right (tried: {'; '.join(tried)})")
