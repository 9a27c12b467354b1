"""Which steps a policy keeps and which it lets go, and which of those that stay must be seen whole before. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from ckpt.format.commit import Attempt
from ckpt.plan.live import LIVE, SUPERSEDED

MIN, MAX = "min", "max"


class Best(msgspec.Struct, frozen=True):
    """The ``count`` live steps whose ``metric`` is least (``mode="min"``) or greatest (``"max"``)."""

    metric: str
    count: int = 1
    mode: str = MIN


class KeepPolicy(msgspec.Struct, frozen=True):
    """Which live steps stay: all (``last=None``), or those that any of the three keeps; made by ``ckpt.keep``."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None


def to_delete(
    states: Mapping[Attempt, tuple[str, str]],
    policy: KeepPolicy,
    metrics: Mapping[Attempt, Mapping[str, float]] | None = None,
    held: Collection[Attempt] = (),
) -> list[Attempt]:
    """The attempts that a policy lets go, oldest first: live steps that none of its rules keeps, and attempts that a
    live one of the same step superseded.

    ``metrics`` are those saved with live steps; a step without the one that ``best`` asks for, or with NaN for it, is
    never among the best. ``held`` stay whatever the policy says: those that a reader holds, and those that another
    step leans on (in ``ckpt/1`` none does). The newest live step is never in the answer, nor is an abandoned one.
    """
    if policy.last is None:
        return []
    live = sorted(attempt for attempt, (state, _) in states.items() if state == LIVE)
    kept = {*held, *live[-max(1, policy.last) :]}
    if policy.every:
        kept.update(attempt for attempt in live if attempt.step % policy.every == 0)
    if policy.best is not None:
        kept.update(best_of(live, policy.best, metrics or {}))
    superseded = [attempt for attempt, (state, _) in states.items() if state == SUPERSEDED]
    return sorted(attempt for attempt in (*live, *superseded) if attempt not in kept)


def best_of(live: Sequence[Attempt], best: Best, metrics: Mapping[Attempt, Mapping[str, float]]) -> list[Attempt]:
    """The best of the live steps, best first; of equally good ones the newer."""
    found = [(value, attempt) for attempt in live if not math.isnan(value := _value(metrics, attempt, best.metric))]
    found.sort(key=lambda pair: pair[1], reverse=True)  # stable: what is equal stays newest first
    found.sort(key=lambda pair: pair[0], reverse=best.mode == MAX)
    return [attempt for _, attempt in found[: best.count]]


def _value(metrics: Mapping[Attempt, Mapping[str, float]], attempt: Attempt, metric: str) -> float:
    return metrics.get(attempt, {}).get(metric, math.nan)


def vouchers(states: Mapping[Attempt, tuple[str, str]], going: Sequence[Attempt]) -> list[Attempt]:
    """The live steps that stay and are newer than all of ``going``, newest first.

    One of them must have been read back whole before any of ``going`` is deleted: then whatever is lost with
    the deletion, a step that is newer and good is there.
    """
    if not going:
        return []
    last = max(going)
    live = (attempt for attempt, (state, _) in states.items() if state == LIVE)
    return sorted((attempt for attempt in live if attempt > last and attempt not in going), reverse=True)
