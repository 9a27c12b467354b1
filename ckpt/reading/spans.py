"""The stretches of a data file that one digest covers each: its header, and every chunk as it is stored."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ckpt.errors import DamagedError
from ckpt.format.chunk import CHUNK_NBYTES, RAW, chunk_spans, decode_chunk
from ckpt.format.part import DataFile
from ckpt.plan.files import Entry
from ckpt.reading.shards import FileShards, check_digest


class Span(msgspec.Struct, frozen=True, gc=False):
    """``nbytes`` stored bytes at ``offset`` of a data file, which decode to ``raw_nbytes`` bytes with that digest."""

    offset: int
    nbytes: int
    raw_nbytes: int
    digest: str
    encoding: str
    tensor: str | None = None  # with its box; None: the header
    chunk: int | None = None  # counts in its shard, or in an XOR file

    @property
    def what(self) -> str:
        """``layers.0.weight[0:512,0:64]: chunk 3``, ``chunk 3`` of an XOR file, or ``header``."""
        if self.chunk is None:
            return "header"
        return f"chunk {self.chunk}" if self.tensor is None else f"{self.tensor}: chunk {self.chunk}"

    def decoded(self, stored: memoryview | bytes | bytearray, where: str) -> memoryview | bytes | bytearray:
        """The raw bytes of ``stored``. DamagedError unless they are what the part says."""
        if self.encoding == RAW:
            check_digest(memoryview(stored), self.digest, where)
            return stored
        raw = decode_chunk(stored, self.encoding, self.raw_nbytes, where)
        check_digest(raw, self.digest, where)
        return raw


def chunk_span(file: DataFile, entry: Entry, index: int, offset: int, nbytes: int) -> Span:
    """The span of one chunk: ``index`` is its place among the file's chunks, ``offset`` its place in the payload.

    DamagedError for a pack that stores more bytes for it than it has: it would have been stored raw.
    """
    tensor = f"{entry.name}{'' if entry.whole else entry.box}"
    number = (offset - entry.offset) // CHUNK_NBYTES
    if file.encoding == RAW:
        return Span(file.header_nbytes + offset, nbytes, nbytes, file.chunks[index], RAW, tensor, number)
    packed = file.packed[index]
    if packed.nbytes > nbytes:
        raise DamagedError(f"{file.name}: {tensor}: chunk {number}: {packed.nbytes} bytes stored for {nbytes}")
    return Span(packed.offset, packed.nbytes, nbytes, packed.digest, packed.encoding, tensor, number)


def header_span(file: DataFile) -> Span:
    """The header of a raw file."""
    return Span(0, file.header_nbytes, file.header_nbytes, file.header_digest, RAW)


def file_spans(shards: FileShards) -> Iterator[Span]:
    """All spans of a data file in the order of its bytes, which they fill without a hole."""
    file = shards.file
    if file.encoding == RAW:
        yield header_span(file)
    for placed in shards.shards:
        entry = placed.entry
        for number, (offset, nbytes) in enumerate(chunk_spans(entry.nbytes)):
            yield chunk_span(file, entry, placed.first_chunk + number, entry.offset + offset, nbytes)


def plain_spans(nbytes: int, digests: tuple[str, ...]) -> Iterator[Span]:
    """The spans of a file that is nothing but chunks of 16 MiB, such as an XOR file."""
    for number, (offset, length) in enumerate(chunk_spans(nbytes)):
        yield Span(offset, length, length, digests[number], RAW, None, number)
