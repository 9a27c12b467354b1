"""Alarms: what looked wrong in a state when it was saved. A step that has some is a step like any other.

Each part has what its rank found; ``alarms.json`` has what that comes to over all ranks, pinned by COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from ckpt.format import records
from ckpt.format.names import is_name

ALARMS = "alarms.json"
FEATURE = "alarms"  # of a COMMIT that pins parts with alarms

NOT_FINITE, UNCHANGED, REPLICAS, RANDOM = "not finite", "unchanged", "replicas", "random"
KINDS = (NOT_FINITE, UNCHANGED, REPLICAS, RANDOM)
NAME_LIMIT_CHARS = 1 << 20


class Alarm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that looked wrong with one tensor or, for ``random``, one generator (``rng.torch``).

    ``not finite``: elements are NaN or infinite. ``unchanged``: a parameter that an optimizer trains has the very bytes
    that it had at the save before. ``replicas``: what ranks should hold alike differs on ``ranks``. ``random``:
    the generators of ``ranks`` are in the same state.
    """

    kind: str
    tensor: str
    nan: int = 0
    inf: int = 0
    nbytes: int = 0  # unchanged, in a part: how many bytes of it this rank wrote
    ranks: tuple[tuple[int, int], ...] = ()  # inclusive ranges: whose elements, who differs, who is alike

    def __str__(self) -> str:
        return f"{self.tensor}{self.detail()}"

    def detail(self) -> str:
        """`` (2 NaN, 1 Inf, rank 1)``: what there is to say beyond kind and name, or nothing."""
        words = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        if self.ranks:
            words.append(ranks_text(self.ranks))
        return f" ({', '.join(words)})" if words else ""


class Alarms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``alarms.json``: all alarms of a step, over all ranks."""

    format: str
    step: int
    attempt: str
    world: int
    alarms: tuple[Alarm, ...]


def ranges(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ranks as ascending inclusive ranges."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        first = found.pop()[0] if found and found[-1][1] == rank - 1 else rank
        found.append((first, rank))
    return tuple(found)


def ranks_text(ranges_: Sequence[tuple[int, int]]) -> str:
    """``rank 1``, ``ranks 0-3, 8``."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges_]
    shown = ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
    return f"rank{'' if len(ranges_) == 1 and ranges_[0][0] == ranges_[0][1] else 's'} {shown}"


def encode_alarms(alarms: Alarms) -> bytes:
    """The bytes of ``alarms.json``. BadInputError for what no reader would take."""
    return records.encode_checked(alarms, check_record)


def decode_alarms(raw: bytes, where: str) -> Alarms:
    """The record in ``raw``; ``where`` is its key."""
    alarms = records.decode(raw, Alarms, where)
    check_record(alarms, where)
    return alarms


def check_record(alarms: Alarms, where: str) -> None:
    """DamagedError for a record that no ckpt wrote, although it can be read."""
    records.check_attempt(alarms.step, alarms.attempt, alarms.world, where)
    check_alarms(alarms.alarms, alarms.world, where)


def check_alarms(alarms: Sequence[Alarm], world: int, where: str) -> None:
    """DamagedError unless each alarm is of a known kind, about a name, with counts and ranks that can be."""
    seen: set[tuple[str, str, tuple[tuple[int, int], ...]]] = set()
    for alarm in alarms:
        if alarm.kind not in KINDS:
            raise records.damaged(where, f"an alarm of the kind {alarm.kind[:64]!r}", f"one of {', '.join(KINDS)}")
        at = f"{where}: alarm about {alarm.tensor[:200]!r}"
        if len(alarm.tensor) > NAME_LIMIT_CHARS or not is_name(alarm.tensor):
            raise records.damaged(at, "no name by the escaping rule", "components joined by '.'")
        for count, what in ((alarm.nan, "NaN"), (alarm.inf, "Inf"), (alarm.nbytes, "bytes")):
            records.check_count(count, at, f"{what}, counting")
        for first, last in alarm.ranks:
            if not 0 <= first <= last < world:
                raise records.damaged(at, "ranks out of range", f"ascending ranges below {world}")
        if any(after[0] <= before[1] for before, after in pairwise(alarm.ranks)):
            raise records.damaged(at, "ranks out of order", f"ascending ranges below {world}")
        key = (alarm.kind, alarm.tensor, alarm.ranks)
        if key in seen:
            raise records.damaged(at, "the same alarm twice", "each once")
        seen.add(key)
