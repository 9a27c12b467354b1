"""What to read from where: boxes that are needed, intersected with boxes that are stored. Pure.

The unit of reading is the chunk, because a chunk is what a digest covers. A chunk is a flat range
of a piece's elements in row-major order, which is at most ``2 * ndim - 1`` boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import msgspec

from ckpt.format.chunk import chunk_spans
from ckpt.format.layout import Tensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, LayoutBoxes
from ckpt.plan.files import Entry


class Placed(msgspec.Struct, frozen=True):
    """An entry of a rank's file and the index of its first chunk among the file's chunks."""

    entry: Entry
    first_chunk: int


class Copy(msgspec.Struct, frozen=True):
    """Elements to copy: ``target[box] = chunk[start : start + source.numel].view(source.sizes)[box - source]``."""

    start: int
    source: Box
    box: Box


class ChunkRead(msgspec.Struct, frozen=True):
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


Placements = Mapping[tuple[str, Box], Placed]


def placed_entries(tables: Mapping[str, Sequence[Entry]]) -> dict[tuple[str, Box], Placed]:
    """(name, box) -> entry and first chunk, of one rank's file tables."""
    result: dict[tuple[str, Box], Placed] = {}
    for table in tables.values():
        chunk = 0
        for entry in table:
            result[entry.name, entry.box] = Placed(entry, chunk)
            chunk += len(chunk_spans(entry.nbytes))
    return result


def chunk_reads(
    boxes: LayoutBoxes, tensor: Tensor, need: Box, placed: Callable[[int], Placements]
) -> Iterator[ChunkRead]:
    """Every chunk that has elements of ``need``; ``placed(rank)`` is asked only for ranks that are needed."""
    for rank, piece in boxes.holders(tensor, need):
        found = placed(rank)[tensor.name, piece]
        yield from entry_reads(rank, found, need)


def entry_reads(rank: int, found: Placed, need: Box) -> Iterator[ChunkRead]:
    """The chunks of one stored piece that have elements of ``need``."""
    entry, piece = found.entry, found.entry.box
    common = piece.intersect(need) if piece.numel else None
    if common is None:
        return
    element_nbytes = DTYPE_NBYTES[entry.dtype]
    first, last = flat_bounds(piece, common)
    row = prod(piece.sizes[1:])
    # Rows of the piece are rows of the target: its bytes can go there as they are.
    rows_alike = piece.sizes[1:] == need.sizes[1:] and piece.offsets[1:] == need.offsets[1:]
    shift = (piece.offsets[0] - need.offsets[0]) * row if piece.sizes else 0
    for number, (offset, nbytes) in enumerate(chunk_spans(entry.nbytes)):
        start, stop = offset // element_nbytes, (offset + nbytes) // element_nbytes
        if stop <= first or start > last:
            continue
        if rows_alike and start + shift >= 0 and stop + shift <= need.numel:
            target_offset: int | None = (start + shift) * element_nbytes
            copies: tuple[Copy, ...] = ()
        else:
            target_offset, copies = None, tuple(_copies(piece, start, stop, need))
            if not copies:
                continue
        yield ChunkRead(rank, entry, found.first_chunk + number, entry.offset + offset, nbytes, target_offset, copies)


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
