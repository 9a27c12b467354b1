"""Parity of one node's ranks: written by whichever of them is the last to have its data files on storage.

Every rank waits for that, with its arena, before it writes its part; so a part that is there says that the parity is
there too, and the XOR needs no memory of its own but a block.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import msgspec

from ckpt.errors import AlreadyExistsError, DamagedError
from ckpt.format import records
from ckpt.format.chunk import CHUNK_NBYTES, RAW
from ckpt.format.commit import Attempt, FileRef
from ckpt.format.parity import Member, Parity, decode_parity, encode_parity, record_name, xor_into, xor_name
from ckpt.format.part import DataFile
from ckpt.keeper.protocol import SaveTask
from ckpt.run import Run
from ckpt.store.base import Sink

BLOCK_NBYTES = 8 << 20  # divides a chunk
RECORD_LIMIT_NBYTES = 64 << 20

Report = Callable[[int], None]  # bytes just written; may raise to stop
Through = Callable[[Sink], Sink]


class Stored(msgspec.Struct, frozen=True):
    """One rank's data files on storage, and the arena that raw ones still lie in."""

    task: SaveTask
    files: tuple[DataFile, ...]
    arena: memoryview


def write_parity(
    run: Run, attempt: Attempt, ranks: Sequence[Stored], keys: list[str], report: Report, through: Through
) -> FileRef:
    """Write the XOR of all data files of ``ranks`` and its record, durable; the record's name, size and digest.

    ``keys`` gets every key as soon as it is this save's own. Raises StoreError; on an error the file under way is
    removed, the rest is up to the caller.
    """
    ranks = sorted(ranks, key=lambda stored: stored.task.rank)
    lowest, world = ranks[0].task.rank, ranks[0].task.world
    readers: list[_Reader] = []
    members = []
    for stored in ranks:
        for file in stored.files:
            readers.append(_reader(run, attempt, stored, file))
            members.append(Member(stored.task.rank, file.name, file.nbytes))
    nbytes = max((member.nbytes for member in members), default=0)
    name = xor_name(lowest, world)
    chunks: list[str] = []
    if members:
        key = run.key(attempt, name)
        with through(run.store.open_sink(key, nbytes)) as sink:
            chunks = _write_xor(sink, nbytes, members, readers, report)
        keys.append(key)
    record = Parity(
        format=records.FORMAT,
        step=attempt.step,
        attempt=attempt.label,
        world=world,
        members=tuple(members),
        name=name,
        nbytes=nbytes,
        chunks=tuple(chunks),
    )
    raw = encode_parity(record)
    keys.append(run.key(attempt, record_name(lowest, world)))
    try:
        run.store.create(keys[-1], raw)
    except AlreadyExistsError:
        keys.pop()  # someone else's
        raise
    return FileRef(record_name(lowest, world), len(raw), records.digest(raw))


_Reader = Callable[[int, int], memoryview]  # (offset, nbytes) -> these bytes of a file, as stored


def _reader(run: Run, attempt: Attempt, stored: Stored, file: DataFile) -> _Reader:
    if file.encoding == RAW:
        start = next(task.arena_offset for task in stored.task.files if task.name == file.name)
        return lambda offset, nbytes: stored.arena[start + offset : start + offset + nbytes]
    key, buffer = run.key(attempt, file.name), bytearray(min(BLOCK_NBYTES, file.nbytes))

    def read(offset: int, nbytes: int) -> memoryview:
        view = memoryview(buffer)[:nbytes]
        run.store.read_into(key, offset, view)
        return view

    return read


def _write_xor(
    sink: Sink, nbytes: int, members: Sequence[Member], readers: Sequence[_Reader], report: Report
) -> list[str]:
    """Block by block; the digests of the chunks."""
    block = memoryview(mmap.mmap(-1, min(BLOCK_NBYTES, nbytes)))  # page-aligned, so that O_DIRECT takes it
    chunks: list[str] = []
    running = records.running_digest()
    for start in range(0, nbytes, BLOCK_NBYTES):
        view = block[: min(BLOCK_NBYTES, nbytes - start)]
        view[:] = bytes(len(view))
        for member, read in zip(members, readers, strict=True):
            length = min(len(view), member.nbytes - start)
            if length > 0:
                xor_into(view, read(start, length))
        running.update(view)
        end = start + len(view)
        if end % CHUNK_NBYTES == 0 or end == nbytes:
            chunks.append(running.hexdigest())
            running = records.running_digest()
        sink.write(view)
        report(len(view))
    return chunks


def read_parity(run: Run, attempt: Attempt, world: int, lowest: int) -> FileRef:
    """Another node's record, which is there once its parts are. DamagedError for one of another attempt."""
    name = record_name(lowest, world)
    key = run.key(attempt, name)
    raw = run.store.get(key, limit_nbytes=RECORD_LIMIT_NBYTES)
    found = decode_parity(raw, f"{run.url}/{key}")
    if (found.step, found.attempt, found.world) != (attempt.step, attempt.label, world):
        raise DamagedError(
            f"{run.url}/{key}: of step {found.step} {found.attempt} of {found.world} ranks, "
            f"expected {attempt.step} {attempt.label} of {world}"
        )
    return FileRef(name, len(raw), records.digest(raw))
