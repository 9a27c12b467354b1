"""One rank's snapshot, from the arena to durable storage: its data files as they are filled, then its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ckpt.errors import AlreadyExistsError, BadInputError, CkptError, NotFoundError
from ckpt.format import records
from ckpt.format.chunk import ENCODINGS, RAW, chunk_spans, encode_zstd
from ckpt.format.commit import COMMIT, Attempt, FileRef
from ckpt.format.part import DataFile, PackedChunk, Part, data_name, encode_part, part_name
from ckpt.keeper.alarms import Look, Memory, Watcher
from ckpt.keeper.protocol import FileTask, SaveTask, arena_end
from ckpt.keeper.saves import SeenPart, see
from ckpt.run import Run
from ckpt.store.base import Sink

BLOCK_NBYTES = 8 << 20

Await = Callable[[int], None]  # returns when so much of the arena, or of a file in it, is final; may raise to stop
Report = Callable[[int], None]  # bytes just written; may raise to stop
Through = Callable[[Sink], Sink]  # what all writes go through on their way to a sink
Together = Callable[[Sequence[DataFile]], None]  # what is to be done between the data files and the part


def check_task(task: SaveTask, arena_nbytes: int) -> None:
    """Refuse a task that does not fit its arena or names files as nobody should. BadInputError."""
    where = f"save task of rank {task.rank}, step {task.step}"
    if not 0 <= task.rank < task.world <= records.MAX_WORLD:
        raise BadInputError(f"{where}: no such rank in a world of {task.world}")
    if not 0 <= min(task.step, task.writer, task.save) <= max(task.step, task.writer, task.save) <= records.MAX_INT:
        raise BadInputError(f"{where}: a step, writer or save below 0 or beyond {records.MAX_INT}")
    if task.max_write_mbps is not None and not 0 < task.max_write_mbps < math.inf:
        raise BadInputError(f"{where}: max_write_mbps {task.max_write_mbps!r}; expected a number above 0, or None")
    if task.encode not in ENCODINGS:
        raise BadInputError(f"{where}: encode {task.encode!r}; expected one of {', '.join(sorted(ENCODINGS))}")
    for file in task.files:
        if not file.group.isidentifier() or file.name != data_name(file.group, task.rank, task.world, task.encode):
            raise BadInputError(f"{where}: a file called {file.name!r} for the group {file.group!r}")
        expected = file.header_nbytes + sum(file.shards)
        if file.nbytes != expected or min(file.header_nbytes, *file.shards, 0) < 0:
            raise BadInputError(f"{where}: {file.name}: {file.nbytes} bytes, header and shards make {expected}")
        if file.arena_offset < 0 or file.arena_offset + file.nbytes > arena_nbytes:
            raise BadInputError(
                f"{where}: {file.name}: bytes {file.arena_offset} to {file.arena_offset + file.nbytes} "
                f"lie outside of the arena's {arena_nbytes}"
            )
    if len({file.name for file in task.files}) != len(task.files):
        raise BadInputError(f"{where}: two files of one name")


def attempt_of(task: SaveTask) -> Attempt:
    """The attempt that a task belongs to."""
    return Attempt(task.step, task.writer, task.save)


def persist(
    run: Run,
    task: SaveTask,
    arena: memoryview,
    keys: list[str],
    *,
    await_ready: Await,
    report: Report,
    through: Through = lambda sink: sink,
    together: Together = lambda _: None,
    memory: Memory | None = None,
) -> SeenPart:
    """Write a rank's files, behind the copy into the arena, and then its part; durable when it returns.

    The part is written only when the whole snapshot is there: until then no crash of anyone can make it count.
    ``keys`` gets every key as soon as it is this task's own. On an error the file under way is
    removed; the rest is up to the caller. ``memory`` is what alarms remember of this rank's saves.
    """
    attempt = attempt_of(task)
    watcher = Watcher(task, memory or Memory())
    files = []
    for index, file in enumerate(task.files):
        if not file.shards:
            continue
        key = run.key(attempt, file.name)
        view = arena[file.arena_offset : file.arena_offset + file.nbytes]
        write, nbytes = (_write_raw, file.nbytes) if task.encode == RAW else (_write_pack, None)
        with through(run.store.open_sink(key, nbytes)) as sink:
            stored = write(sink, file, view, watcher.of_file(index), _of_file(file, await_ready), report)
        keys.append(key)
        files.append(stored)
    await_ready(arena_end(task))
    together(files)
    part = Part(
        format=records.FORMAT,
        step=task.step,
        attempt=attempt.label,
        rank=task.rank,
        world=task.world,
        layout=task.layout,
        files=tuple(files),
        rank_tensors=task.rank_tensors,
        values=task.values,
        values_digests=task.values_digests,
        rank_values=task.rank_values,
        alarms=watcher.alarms(),
    )
    raw = encode_part(part)
    name = part_name(task.rank, task.world)
    keys.append(run.key(attempt, name))
    try:
        run.store.create(keys[-1], raw)
    except AlreadyExistsError:
        keys.pop()  # someone else's
        raise
    return see(part, FileRef(name, len(raw), records.digest(raw)))


def uncommitted(run: Run, attempt: Attempt) -> bool:
    """Whether there is definitely no COMMIT."""
    try:
        run.store.size(run.key(attempt, COMMIT))
    except NotFoundError:
        return True
    except CkptError:
        return False
    return False


def _of_file(file: FileTask, await_ready: Await) -> Await:
    return lambda nbytes: await_ready(file.arena_offset + nbytes)


def _chunks(file: FileTask) -> Iterator[tuple[int, int, int]]:
    """(number of the shard, offset in the file, nbytes) of every chunk."""
    start = file.header_nbytes
    for shard, shard_nbytes in enumerate(file.shards):
        for offset, nbytes in chunk_spans(shard_nbytes):
            yield shard, start + offset, nbytes
        start += shard_nbytes


def _write_raw(
    sink: Sink, file: FileTask, view: memoryview, look: Look, await_ready: Await, report: Report
) -> DataFile:
    """As it lies. Digests run just ahead of the writing, so that a block is written from the cache.

    Blocks start at multiples of their size, whatever the chunks do: page-aligned, so that O_DIRECT takes them.
    """
    written = 0

    def write_up_to(digested: int) -> None:
        nonlocal written
        while digested - written >= BLOCK_NBYTES or (digested == file.nbytes and written < digested):
            block = view[written : min(written + BLOCK_NBYTES, digested)]
            sink.write(block)
            written += len(block)
            report(len(block))

    await_ready(file.header_nbytes)
    header_digest = records.digest(view[: file.header_nbytes])
    chunks = []
    for shard, offset, nbytes in _chunks(file):
        await_ready(offset + nbytes)
        chunks.append(look(shard, view[offset : offset + nbytes]))
        write_up_to(offset + nbytes)
    write_up_to(file.nbytes)
    return DataFile(
        group=file.group,
        name=file.name,
        nbytes=file.nbytes,
        encoding=RAW,
        header_nbytes=file.header_nbytes,
        header_digest=header_digest,
        chunks=tuple(chunks),
    )


def _write_pack(
    sink: Sink, file: FileTask, view: memoryview, look: Look, await_ready: Await, report: Report
) -> DataFile:
    """Chunk by chunk, each encoded or, where that would not be smaller, as it is."""
    packed = []
    at = 0
    for shard, offset, nbytes in _chunks(file):
        await_ready(offset + nbytes)
        raw = view[offset : offset + nbytes]
        digest = look(shard, raw)
        encoded = encode_zstd(raw)
        stored = raw if encoded is None else encoded
        sink.write(stored)
        packed.append(PackedChunk(digest, at, len(stored), RAW if encoded is None else "zstd"))
        at += len(stored)
        report(nbytes)
    return DataFile(
        group=file.group,
        name=file.name,
        nbytes=at,
        encoding="zstd",
        header_nbytes=0,
        header_digest="",
        chunks=(),
        packed=tuple(packed),
    )
