"""What to read from where: boxes that are needed, intersected with boxes that are stored. Pure.

The unit of reading is the chunk, because a chunk is what a digest covers. A chunk is a flat range
of a piece's elements in row-major order, which is at most ``2 * ndim - 1`` boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec

from ckpt.format.chunk import chunk_spans
from ckpt.format.layout import Tensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, LayoutBoxes
from ckpt.plan.files import Entry

KNOWN_SHARES = 100_000  # kept by a Shares; some 300 bytes each


class Placed(msgspec.Struct, frozen=True, gc=False):
    """An entry of a rank's file and the index of its first chunk among the file's chunks."""

    entry: Entry
    first_chunk: int


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Elements to copy: ``target[box] = chunk[start : start + source.numel].view(source.sizes)[box - source]``."""

    start: int
    source: Box
    box: Box


class ChunkRead(msgspec.Struct, frozen=True, gc=False):
    """One chunk to read: ``nbytes`` at payload ``offset`` of the rank's file of ``entry.group``, its chunk ``index``.

    ``target_offset`` is where its bytes go as they are in the row-major target (bytes), when that
    is so; else ``copies`` say which elements go where.
    """

    rank: int
    entry: Entry
    index: int
    offset: int
    nbytes: int
    target_offset: int | None
    copies: tuple[Copy, ...]


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A chunk of a piece that has elements of what is needed: ``number`` and ``offset`` (bytes) count in the piece.

    ``target_offset`` and ``copies`` are those of ``ChunkRead``.
    """

    number: int
    offset: int
    nbytes: int
    target_offset: int | None
    copies: tuple[Copy, ...]

    def read(self, rank: int, placed: Placed) -> ChunkRead:
        """The chunk of the piece that lies there in the file of ``rank``."""
        entry = placed.entry
        index, offset = placed.first_chunk + self.number, entry.offset + self.offset
        return ChunkRead(rank, entry, index, offset, self.nbytes, self.target_offset, self.copies)


class Share(msgspec.Struct, frozen=True, gc=False):
    """What ``rank`` has stored of what is needed: ``numel`` elements of its ``piece``, which lie in ``cuts``."""

    rank: int
    piece: Box
    numel: int
    cuts: tuple[Cut, ...]


class Shares:
    """Who has what of what is needed, worked out once for all the tensors that are cut alike: they are thousands."""

    def __init__(self, boxes: LayoutBoxes) -> None:
        self._boxes = boxes
        self._known: dict[Any, list[Share]] = {}
        self._count = 0

    def of(self, tensor: Tensor, need: Box) -> list[Share]:
        """The shares of ``need``, which together are all of it when every rank has written its pieces."""
        key = (tensor.mesh, tensor.placements, tensor.shape, tensor.owners, tensor.dtype, need)
        shares = self._known.get(key)
        if shares is None:
            element_nbytes = DTYPE_NBYTES[tensor.dtype]
            shares = [share(rank, piece, element_nbytes, need) for rank, piece in self._boxes.holders(tensor, need)]
            if self._count > KNOWN_SHARES:
                self._known.clear()
                self._count = 0
            self._known[key] = shares
            self._count += len(shares)
        return shares


def share(rank: int, piece: Box, element_nbytes: int, need: Box) -> Share:
    """What ``piece`` has of ``need``."""
    common = piece.intersect(need) if piece.numel else None
    if common is None:
        return Share(rank, piece, 0, ())
    return Share(rank, piece, common.numel, tuple(_cuts(piece, common, element_nbytes, need)))


def entry_reads(rank: int, found: Placed, need: Box) -> Iterator[ChunkRead]:
    """The chunks of one stored piece that have elements of ``need``."""
    for cut in share(rank, found.entry.box, DTYPE_NBYTES[found.entry.dtype], need).cuts:
        yield cut.read(rank, found)


def _cuts(piece: Box, common: Box, element_nbytes: int, need: Box) -> Iterator[Cut]:
    first, last = flat_bounds(piece, common)
    row = prod(piece.sizes[1:])
    # Rows of the piece are rows of the target: its bytes can go there as they are.
    rows_alike = piece.sizes[1:] == need.sizes[1:] and piece.offsets[1:] == need.offsets[1:]
    shift = (piece.offsets[0] - need.offsets[0]) * row if piece.sizes else 0
    for number, (offset, nbytes) in enumerate(chunk_spans(piece.numel * element_nbytes)):
        start, stop = offset // element_nbytes, (offset + nbytes) // element_nbytes
        if stop <= first or start > last:
            continue
        if rows_alike and start + shift >= 0 and stop + shift <= need.numel:
            yield Cut(number, offset, nbytes, (start + shift) * element_nbytes, ())
            continue
        copies = tuple(_copies(piece, start, stop, need))
        if copies:
            yield Cut(number, offset, nbytes, None, copies)


def _copies(piece: Box, start: int, stop: int, need: Box) -> Iterator[Copy]:
    for position, source in flat_range_boxes(piece, start, stop):
        box = source.intersect(need)
        if box is not None:
            yield Copy(position - start, source, box)


def flat_bounds(piece: Box, inner: Box) -> tuple[int, int]:
    """First and last flat element (row-major in ``piece``) of ``inner``, which lies inside it."""
    first = last = 0
    for size, start, length in zip(piece.sizes, inner.relative_to(piece).offsets, inner.sizes, strict=True):
        first = first * size + start
        last = last * size + start + length - 1
    return first, last


def flat_range_boxes(piece: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes that make up flat elements ``[start, stop)`` of ``piece``, each with its flat start."""
    if start >= stop:
        return
    if not piece.sizes:
        yield 0, piece
        return
    row = prod(piece.sizes[1:])
    first, last = start // row, (stop - 1) // row

    def rows(low: int, high: int) -> Box:
        return Box((piece.offsets[0] + low, *piece.offsets[1:]), (high - low, *piece.sizes[1:]))

    def within(index: int, low: int, high: int) -> Iterator[tuple[int, Box]]:
        inner = Box(piece.offsets[1:], piece.sizes[1:])
        for position, box in flat_range_boxes(inner, low, high):
            whole = Box((piece.offsets[0] + index, *box.offsets), (1, *box.sizes))
            yield index * row + position, whole

    if first == last and stop - start < row:
        yield from within(first, start - first * row, stop - first * row)
        return
    low, high = -(-start // row), stop // row
    if start < low * row:
        yield from within(first, start - first * row, row)
    if low < high:
        yield low * row, rows(low, high)
    if high * row < stop:
        yield from within(high, 0, stop - high * row)
