"""What the keeper finds wrong with a state while it digests it, and what that comes to over all ranks.

A rank's shards are looked at while their bytes are in the processor's cache: elements that are no finite numbers are
counted, and the digests of what is trained are compared with those of the save before. The coordinator adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import msgspec

from ckpt.errors import BadInputError, SaveFailedError
from ckpt.format import records
from ckpt.format.alarms import KINDS, NOT_FINITE, UNCHANGED, Alarm, ranges
from ckpt.format.finite import count_not_finite
from ckpt.format.layout import decode_layout
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.keeper.protocol import LayoutTask, SaveTask

LOOK_NBYTES = 512 << 10  # digested, then counted: still in the cache of the processor's core

Look = Callable[[int, memoryview], str]  # of a shard's number in its file and a chunk of it: the chunk's digest

_MEANINGS = {
    UNCHANGED: "the very bytes of the save before, though an optimizer trains it (a stale snapshot, or frozen)",
    NOT_FINITE: "NaN or infinite",
}


class ShardWatch(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a file, in file order: ``dtype`` is "" where elements need not be counted."""

    name: str
    dtype: str
    trained: bool


Watch = tuple[tuple[ShardWatch, ...], ...]  # by file of the task

_watch_decoder = msgspec.msgpack.Decoder(Watch)


def encode_watch(watch: Sequence[Sequence[ShardWatch]]) -> bytes:
    """What a task's shards are, as it goes to the keeper."""
    return msgspec.msgpack.encode(watch)


def look_at_nothing(_: int, view: memoryview) -> str:
    """The Look of a save without alarms."""
    return records.digest(view)


class Memory:
    """What one rank's trained tensors were at its last saves: of two steps, since a save may be made again."""

    def __init__(self) -> None:
        self._saves: list[tuple[int, str, dict[str, list[str]]]] = []  # step, layout, digests by name

    def compare(self, step: int, layout: str, digests: dict[str, list[str]]) -> list[str]:
        """The names whose digests are those of the newest save of an earlier step, and remember this one's."""
        earlier = [save for save in self._saves if save[0] < step][-1:]
        self._saves = [*earlier, (step, layout, digests)]
        if not earlier or earlier[0][1] != layout:
            return []
        before = earlier[0][2]
        return [name for name, found in digests.items() if before.get(name) == found]


class Watcher:
    """Looks at one rank's shards while they are digested."""

    def __init__(self, task: SaveTask, memory: Memory) -> None:
        """BadInputError for a task whose watch is not about its shards."""
        self._task = task
        self._memory = memory
        self._watch: Watch = ()
        self._counts: dict[str, list[int]] = {}
        self._digests: dict[str, list[str]] = {}
        self._nbytes: dict[str, int] = {}
        if task.watch is None:
            return
        try:
            self._watch = _watch_decoder.decode(task.watch.raw)
        except msgspec.DecodeError as error:
            raise BadInputError(f"save task of rank {task.rank}, step {task.step}: watch: {error}") from None
        if [len(rows) for rows in self._watch] != [len(file.shards) for file in task.files]:
            raise BadInputError(f"save task of rank {task.rank}, step {task.step}: watch is of other shards")

    def of_file(self, index: int) -> Look:
        """What digests the chunks of the task's file ``index``."""
        if not self._watch:
            return look_at_nothing
        rows = self._watch[index]
        return lambda shard, view: self._look(rows[shard], view)

    def _look(self, shard: ShardWatch, view: memoryview) -> str:
        if shard.dtype:
            running = records.running_digest()
            for start in range(0, len(view), LOOK_NBYTES):
                block = view[start : start + LOOK_NBYTES]
                running.update(block)
                nan, inf = count_not_finite(block, shard.dtype)
                if nan or inf:
                    counts = self._counts.setdefault(shard.name, [0, 0])
                    counts[0] += nan
                    counts[1] += inf
            digest = running.hexdigest()
        else:
            digest = records.digest(view)
        if shard.trained:
            self._digests.setdefault(shard.name, []).append(digest)
            self._nbytes[shard.name] = self._nbytes.get(shard.name, 0) + len(view)
        return digest

    def alarms(self) -> tuple[Alarm, ...]:
        """What was found, once all of the task's files are digested; with what its trainer has found."""
        task = self._task
        if task.watch is None:
            return ()
        found = [Alarm(NOT_FINITE, name, nan=nan, inf=inf) for name, (nan, inf) in self._counts.items()]
        same = self._memory.compare(task.step, task.layout, self._digests)
        found += [Alarm(UNCHANGED, name, nbytes=self._nbytes[name]) for name in same]
        return (*found, *task.found)


class Sum:
    """The alarms of all ranks, added up as their parts come."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._ranks: dict[str, list[int]] = {}
        self._unchanged: dict[str, int] = {}
        self._others: list[Alarm] = []

    def add(self, rank: int, alarms: Iterable[Alarm]) -> None:
        """What is in one rank's part."""
        for alarm in alarms:
            if alarm.kind == NOT_FINITE:
                counts = self._counts.setdefault(alarm.tensor, [0, 0])
                counts[0] += alarm.nan
                counts[1] += alarm.inf
                self._ranks.setdefault(alarm.tensor, []).append(rank)
            elif alarm.kind == UNCHANGED:
                self._unchanged[alarm.tensor] = self._unchanged.get(alarm.tensor, 0) + alarm.nbytes
            else:
                self._others.append(alarm)

    def total(self, layouts: Sequence[LayoutTask]) -> tuple[Alarm, ...]:
        """All alarms of the step. A tensor is unchanged when every byte of it is, whoever wrote it."""
        found = [
            Alarm(NOT_FINITE, name, nan=nan, inf=inf, ranks=ranges(self._ranks[name]))
            for name, (nan, inf) in self._counts.items()
        ]
        if self._unchanged:
            nbytes = _tensor_nbytes(layouts)
            same = [name for name, unchanged in self._unchanged.items() if unchanged == nbytes.get(name)]
            found += [Alarm(UNCHANGED, name) for name in same]
        found += self._others
        return tuple(sorted(found, key=lambda alarm: (KINDS.index(alarm.kind), alarm.tensor, alarm.ranks)))


def _tensor_nbytes(layouts: Sequence[LayoutTask]) -> Mapping[str, int]:
    return {
        tensor.name: prod(tensor.shape) * DTYPE_NBYTES[tensor.dtype]
        for task in layouts
        for tensor in decode_layout(task.raw, task.digest).tensors
    }


def refuse(alarms: Sequence[Alarm]) -> None:
    """SaveFailedError naming the tensors, if there are any that the keepers found."""
    sentences = []
    for kind in KINDS:
        found = [alarm for alarm in alarms if alarm.kind == kind and kind in _MEANINGS]
        if found:
            shown = ", ".join(str(alarm) for alarm in found[:3]) + more(len(found) - 3)
            sentences.append(f"{shown}: {_MEANINGS[kind]}")
    if sentences:
        error = SaveFailedError(f'alarms="raise": {"; ".join(sentences)}')
        error.exit_code = BadInputError.exit_code  # the state's fault, which on_error="warn" does not get over
        raise error


def more(count: int) -> str:
    """`` and 5 more``, or nothing."""
    return f" and {count} more" if count > 0 else ""
