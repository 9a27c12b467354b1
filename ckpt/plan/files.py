"""What lies where in a rank's data files: arithmetic on the layout, the same for writer and reader."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from ckpt.format.layout import Layout, Tensor
from ckpt.format.part import RankTensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, LayoutBoxes, whole_box

PAGE_NBYTES = 4096
GROUPS = ("model", "optimizer", "state")


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One shard in a data file: ``offset`` and ``nbytes`` count from the start of the file's payload."""

    name: str
    key: str
    group: str
    dtype: str
    kind: str
    box: Box
    offset: int
    nbytes: int
    whole: bool


def file_key(group: str, name: str, box: Box, shape: Sequence[int]) -> str:
    """The key of a shard in its file: no group prefix, and ``[0:512,0:64]`` behind it when it is not whole."""
    return _bare(group, name) + _suffix(box, shape)


def _bare(group: str, name: str) -> str:
    return name if group == "state" else name.removeprefix(f"{group}.")


def _suffix(box: Box, shape: Sequence[int]) -> str:
    return "" if box == whole_box(shape) else str(box)


class _Piece(NamedTuple):
    """A box that is written, as tensors that are cut alike have it."""

    box: Box
    nbytes: int
    suffix: str  # of its key; none of a whole tensor
    place: tuple[int, int]  # sorts it among the shards of its file


def _piece(box: Box, shape: Sequence[int], itemsize: int) -> _Piece:
    nbytes = box.numel * itemsize
    paged = nbytes > 0 and nbytes % PAGE_NBYTES == 0
    return _Piece(box, nbytes, _suffix(box, shape), (0, 0) if paged else (1, -itemsize))


def file_tables(
    layout: Layout, rank: int, rank_tensors: Sequence[RankTensor] = (), boxes: LayoutBoxes | None = None
) -> dict[str, list[Entry]]:
    """The shards that ``rank`` writes, by group, in file order. Groups without a shard are left out.

    Shards whose bytes fill whole pages come first, so that they are page-aligned without holes;
    then by element size, largest first, so that each is aligned to its elements; within these in
    layout order, a rank's own tensors last.
    """
    boxes = boxes or LayoutBoxes(layout)
    found: dict[str, list[tuple[tuple[int, int], Tensor | RankTensor, _Piece]]] = {group: [] for group in GROUPS}
    # Thousands of tensors are on a few meshes and cut in a few ways.
    replicas: dict[tuple[int, tuple[str, ...]], int | None] = {}
    alike: dict[Any, list[_Piece]] = {}
    for tensor in layout.tensors:
        grid = (tensor.mesh, tensor.placements)
        if grid not in replicas:
            replicas[grid] = boxes.replica(tensor, rank)
        if replicas[grid] not in tensor.owners:
            continue
        cut = (tensor.mesh, tensor.placements, tensor.shape, tensor.owners, tensor.dtype)
        pieces = alike.get(cut)
        if pieces is None:
            itemsize = DTYPE_NBYTES[tensor.dtype]
            pieces = alike[cut] = [_piece(box, tensor.shape, itemsize) for box in boxes.owned(tensor, rank)]
        for piece in pieces:
            found[tensor.group].append((piece.place, tensor, piece))
    for own in rank_tensors:
        piece = _piece(whole_box(own.shape), own.shape, DTYPE_NBYTES[own.dtype])
        found["state"].append((piece.place, own, piece))
    return {group: _table(group, rows) for group, rows in found.items() if rows}


def _table(group: str, rows: list[tuple[tuple[int, int], Tensor | RankTensor, _Piece]]) -> list[Entry]:
    offset, table = 0, []
    for _, tensor, (box, nbytes, suffix, _) in sorted(rows, key=itemgetter(0)):
        key = _bare(group, tensor.name) + suffix
        table.append(Entry(tensor.name, key, group, tensor.dtype, tensor.kind, box, offset, nbytes, not suffix))
        offset += nbytes
    return table
