"""What trainers find wrong with a state before it is saved, and how alarms are told.

Ranks that should hold the same bytes compare samples of them in the one all-reduce that every save makes; random states
are compared once. What is not finite, or has not changed, the keeper finds (``ckpt.keeper.alarms``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ckpt.engine.pending import PendingSave
from ckpt.engine.prepare import ArenaFile, Prepared, SavePlan, unchanged
from ckpt.engine.ranks import Ranks
from ckpt.errors import SaveFailedError
from ckpt.format import records
from ckpt.format.alarms import NOT_FINITE, RANDOM, REPLICAS, UNCHANGED, Alarm, ranges
from ckpt.format.finite import may_be_not_finite
from ckpt.format.values import encode, values_digest
from ckpt.keeper.alarms import ShardWatch, encode_watch, more
from ckpt.keeper.protocol import WatchTask
from ckpt.plan.files import Entry
from ckpt.plan.replicas import ReplicaSets, replica_sets
from ckpt.plan.save import Structure
from ckpt.snapshot.samples import sample
from ckpt.state import FlatState

OFF, RAISE = "off", "raise"

SLOTS = 64  # sets of ranks that one save compares; where there are more, they take turns
NAMED_SETS = 16  # whose tensors are named when they differ
NAMES_SHOWN = 3

_SCRAMBLE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: close numbers fall far apart

_SENTENCES = {
    NOT_FINITE: "NaN or infinite elements in {names}",
    UNCHANGED: "{names}: not one byte has changed since the save before, though an optimizer trains it: "
    "a stale snapshot, or frozen by mistake?",
    REPLICAS: "{names}: ranks that should hold the same bytes do not, so what is saved is not what all of them train",
    RANDOM: "{names}: random generators in the same state; right for ranks of one tensor-parallel group, "
    "wrong for data-parallel ones, which should be seeded differently",
}


def sentence(kind: str, alarms: Sequence[Alarm]) -> str:
    """All alarms of one kind in one line."""
    names = ", ".join(str(alarm) for alarm in alarms[:NAMES_SHOWN]) + more(len(alarms) - NAMES_SHOWN)
    return _SENTENCES[kind].format(names=names)


class _Watched(msgspec.Struct, frozen=True):
    """Which tensors of a structure this rank shares with which set of ranks."""

    plan: SavePlan
    sets: ReplicaSets
    rows: tuple[tuple[int, str, int], ...]  # index among the structure's tensors, name, set


class AlarmWatch:
    """One session's. ``begin`` is called by every rank at every save, ``judge`` when all have agreed to make it."""

    def __init__(self, ranks: Ranks) -> None:
        self.found: tuple[Alarm, ...] = ()  # by the trainers, in the save under way; the same on all ranks
        self._ranks = ranks
        self._turn = 0
        self._differing: Sequence[bool] | None = None  # by slot; None: not compared yet
        self._watched: _Watched | None = None
        self._suspects: dict[str, int] = {}  # what differed once is looked at there again, until it is equal
        self._random_judged = False
        self._renewals = ranks.renewals
        self._files: tuple[Sequence[ArenaFile], frozenset[str], WatchTask] | None = None
        self._told: dict[str, frozenset[str]] = {}

    # -- replicas: what rides in the all-reduce --------------------------------------------

    def begin(self, saves: int, loaded_step: int | None) -> list[int | None]:
        """The slots of a rank that has nothing to compare.

        Which bytes are looked at follows from what all ranks know alike: how many ``saves`` there were since the run
        was opened, so that in time all have their turn, and what the job went on from, so that the next one does not
        begin where this one did.
        """
        if self._renewals != self._ranks.renewals:  # ranks may have been left at different places of an earlier save
            self._renewals = self._ranks.renewals
            self._random_judged = False
            self._suspects.clear()
        self._turn = saves + ((loaded_step or 0) * _SCRAMBLE >> 32) % 2**32
        self._differing = None
        self.found = ()
        return [None] * SLOTS

    def samples(self, prepared: Prepared, structure: Structure, plan: SavePlan, mode: str) -> list[int | None]:
        """By slot, a number for what this rank shares with others, from samples of its bytes."""
        slots: list[int | None] = [None] * SLOTS
        if mode == OFF or self._ranks.world == 1 or not unchanged(prepared.structure, structure):
            return slots
        watched = self._watch(prepared.structure, plan)
        gathered: dict[int, list[bytes]] = {}
        for (_, _, number), found in zip(watched.rows, self._sampled(prepared.flat, watched), strict=True):
            gathered.setdefault(number, []).append(found)
        for number, samples in gathered.items():
            slot = self._slot(number, watched)
            if slot is not None:
                slots[slot] = int(records.digest(b"".join(samples))[:16], 16) >> 1
        return slots

    def compared(self, differing: Sequence[bool]) -> None:
        """What the all-reduce said of each slot."""
        self._differing = differing

    def _watch(self, structure: Structure, plan: SavePlan) -> _Watched:
        if self._watched is None or self._watched.plan is not plan:
            sets = replica_sets(plan.layouts, plan.mine, self._ranks.rank)
            rows = tuple(
                (index, what.name, sets.mine[what.name])
                for index, what in enumerate(structure.tensors)
                if what.name in sets.mine and not what.first_rank_owns
            )
            self._watched = _Watched(plan, sets, rows)
            self._suspects.clear()
        return self._watched

    def _slot(self, number: int, watched: _Watched) -> int | None:
        sets = len(watched.sets.sets)
        slot = number if sets <= SLOTS else (number - self._turn * SLOTS) % sets
        return slot if slot < SLOTS else None

    def _sampled(self, flat: FlatState, watched: _Watched) -> list[bytes]:
        found = sample([flat.tensors[index].tensor for index, _, _ in watched.rows], self._turn)
        if self._suspects:
            for place, (index, name, _) in enumerate(watched.rows):
                turn = self._suspects.get(name)
                if turn is not None:
                    found[place] += sample([flat.tensors[index].tensor], turn)[0]
        return found

    # -- judging ---------------------------------------------------------------------------

    def judge(self, prepared: Prepared, plan: SavePlan, mode: str) -> None:
        """Name what the comparison found, in ``found``; collective only when there is something, or at the first save.

        Rank 0 says it. SaveFailedError on every rank with ``mode`` "raise".
        """
        if mode == OFF or self._ranks.world == 1:
            return
        if self._differing is None:  # the ranks had more to tell each other than what the all-reduce takes
            slots = self.samples(prepared, prepared.structure, plan, mode)
            self._differing = self._ranks.agree([], [], slots)[2]
        found = self._unequal(prepared, self._watch(prepared.structure, plan), self._differing)
        random: list[Alarm] = []
        if not self._random_judged:
            self._random_judged = True
            random = self._alike(prepared.flat)
        self.found = (*found, *random)
        self._tell(REPLICAS, found)
        self._tell(RANDOM, random)
        if mode != RAISE:
            return
        wrong = [sentence(REPLICAS, found)] if found else []
        # Ranks that shard tensors may be tensor parallel, and share random states on purpose.
        if random and len(plan.layouts) == 1 and all(what.mesh_shape is None for what in prepared.structure.tensors):
            wrong.append(sentence(RANDOM, random))
        if wrong:
            raise SaveFailedError(f'alarms="raise": {"; ".join(wrong)}')

    def _unequal(self, prepared: Prepared, watched: _Watched, differing: Sequence[bool]) -> list[Alarm]:
        if self._suspects:
            for _, name, number in watched.rows:
                slot = self._slot(number, watched)
                if slot is not None and not differing[slot]:
                    self._suspects.pop(name, None)
        if not any(differing):
            return []
        slots = [(number, self._slot(number, watched)) for number in range(len(watched.sets.sets))]
        wrong = [number for number, slot in slots if slot is not None and differing[slot]][:NAMED_SETS]
        mine: dict[int, dict[str, str]] = {number: {} for number in wrong}
        for (_, name, number), found in zip(watched.rows, self._sampled(prepared.flat, watched), strict=True):
            if number in mine:
                mine[number][name] = records.digest(found)[:16]
        others: dict[str, list[int]] = {}
        everyone = self._ranks.gather(mine)
        for number in wrong:
            members = watched.sets.sets[number]
            for name in everyone[members[0]][number]:
                digests = [everyone[rank][number].get(name) for rank in members]
                if None not in digests and len(set(digests)) > 1:
                    usual = Counter(digests).most_common(1)[0][0]  # of equally many the lowest rank's
                    odd = [rank for rank, digest in zip(members, digests, strict=True) if digest != usual]
                    others.setdefault(name, []).extend(odd)
        for name in others:
            self._suspects.setdefault(name, self._turn)
        return [Alarm(REPLICAS, name, ranks=ranges(odd)) for name, odd in sorted(others.items())]

    def _alike(self, flat: FlatState) -> list[Alarm]:
        """Generators that are in the same state on several ranks. Collective."""
        mine = {
            f"{key}.{generator}": values_digest(encode(state, key))
            for key in flat.generators
            for generator, state in _generators(flat.rank_values.get(key))
        }
        holders: dict[tuple[str, str], list[int]] = {}
        for rank, digests in enumerate(self._ranks.gather(mine)):
            for name, digest in digests.items():
                holders.setdefault((name, digest), []).append(rank)
        return [
            Alarm(RANDOM, name, ranks=ranges(ranks)) for (name, _), ranks in sorted(holders.items()) if len(ranks) > 1
        ]

    # -- what the keeper is to look for ----------------------------------------------------

    def task(self, files: Sequence[ArenaFile], flat: FlatState, mode: str) -> WatchTask | None:
        """What the keeper is told of these files; the same object while it is the same."""
        if mode == OFF:
            return None
        known = self._files
        if known is None or known[0] is not files or known[1] != flat.trained:
            watch = [[_shard_watch(entry, flat.trained) for entry in file.entries] for file in files]
            raw = encode_watch(watch)
            known = self._files = files, frozenset(flat.trained), WatchTask(records.digest(raw), raw)
        return known[2]

    # -- telling ---------------------------------------------------------------------------

    def note(self, pendings: Iterable[PendingSave]) -> None:
        """Say what steps that have come to be since were found wrong with."""
        for pending in pendings:
            if pending.committed and not pending.alarms_told:
                pending.alarms_told = True
                for kind in (NOT_FINITE, UNCHANGED):
                    self._tell(kind, [alarm for alarm in pending.alarms if alarm.kind == kind], pending.step)

    def _tell(self, kind: str, alarms: Sequence[Alarm], step: int | None = None) -> None:
        """One line on rank 0's standard error, unless the same was said of the save before."""
        names = frozenset(alarm.tensor for alarm in alarms)
        before = self._told.get(kind, frozenset())
        # Samples of replicas do not hit the same place each time: what differed once is not said again.
        self._told[kind] = names | before if kind == REPLICAS else names
        news = names - before if kind == REPLICAS else names
        if news and names != before and self._ranks.rank == 0:
            where = "alarm" if step is None else f"alarm, step {step}"
            print(f"ckpt: {where}: {sentence(kind, alarms)}", file=sys.stderr)


def _shard_watch(entry: Entry, trained: set[str]) -> ShardWatch:
    return ShardWatch(entry.name, entry.dtype if may_be_not_finite(entry.dtype) else "", entry.name in trained)


def _generators(tree: Any) -> Iterable[tuple[str, Any]]:
    return tree.items() if isinstance(tree, Mapping) else ()
