"""A part's files joined with the shards that its layout says are in them, and their chunks' digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ckpt.errors import DamagedError
from ckpt.format import records
from ckpt.format.chunk import CHUNK_NBYTES, RAW, chunk_count
from ckpt.format.part import DataFile, Part
from ckpt.plan.files import Entry
from ckpt.plan.load import Placed


class FileShards(msgspec.Struct, frozen=True):
    """A data file of a part, with its shards in file order."""

    file: DataFile
    shards: list[Placed]

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all shards as they are in memory."""
        return sum(shard.entry.nbytes for shard in self.shards)


def part_files(part: Part, tables: Mapping[str, Sequence[Entry]], where: str) -> list[FileShards]:
    """A part's data files joined with what the layout says is in them.

    ``tables`` is ``ckpt.plan.files.file_tables`` of the part's layout, rank and rank tensors;
    ``where`` (the part's key) goes into the message. DamagedError when the two do not agree.
    """
    found = [file.group for file in part.files]
    if sorted(found) != sorted(tables):
        raise DamagedError(f"{where}: files for the groups {sorted(found)}, its layout has shards for {sorted(tables)}")
    joined = []
    for file in part.files:
        shards, chunks = [], 0
        for entry in tables[file.group]:
            shards.append(Placed(entry, chunks))
            chunks += chunk_count(entry.nbytes)
        result = FileShards(file, shards)
        stored_chunks = len(file.chunks) if file.encoding == RAW else len(file.packed)
        if stored_chunks != chunks:
            raise DamagedError(f"{where}: {stored_chunks} chunk digests for {file.name}, its layout makes {chunks}")
        if file.encoding == RAW and file.nbytes != file.header_nbytes + result.payload_nbytes:
            raise DamagedError(
                f"{where}: {file.name} of {file.nbytes} bytes, its layout makes "
                f"{file.header_nbytes} of header and {result.payload_nbytes} of tensors"
            )
        joined.append(result)
    return joined


def check_digest(view: memoryview | bytes, expected: str, where: str) -> None:
    """DamagedError, with both digests, when ``view`` is not what its part says."""
    found = records.digest(view)
    if found != expected:
        raise wrong_digest(found, expected, where)


def wrong_digest(found: str, expected: str, where: str) -> DamagedError:
    """The error for bytes with another digest than their part says."""
    return DamagedError(f"{where}: digest {found}, its part says {expected}")


def chunk_text(entry: Entry, offset: int) -> str:
    """``layers.0.weight[0:512,0:64]: chunk 3``, for messages; ``offset`` is the chunk's place in the payload."""
    return f"{entry.name}{'' if entry.whole else entry.box}: chunk {(offset - entry.offset) // CHUNK_NBYTES}"


def shard_digests(file: DataFile, shard: Placed) -> tuple[str, ...]:
    """The digests of a shard's raw bytes, chunk by chunk, whatever the file's encoding."""
    first, count = shard.first_chunk, chunk_count(shard.entry.nbytes)
    if file.encoding == RAW:
        return file.chunks[first : first + count]
    return tuple(packed.digest for packed in file.packed[first : first + count])
