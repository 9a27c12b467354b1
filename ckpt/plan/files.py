"""What lies where in a rank's data files: arithmetic on the layout, the same for writer and reader."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckpt.format.layout import Layout
from ckpt.format.part import RankTensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, LayoutBoxes, whole_box

PAGE_NBYTES = 4096
GROUPS = ("model", "optimizer", "state")


class Entry(msgspec.Struct, frozen=True):
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
    bare = name.removeprefix(f"{group}.") if group != "state" else name
    return bare if box == whole_box(shape) else f"{bare}{box}"


def file_tables(
    layout: Layout, rank: int, rank_tensors: Sequence[RankTensor] = (), boxes: LayoutBoxes | None = None
) -> dict[str, list[Entry]]:
    """The shards that ``rank`` writes, by group, in file order. Groups without a shard are left out.

    Shards whose bytes fill whole pages come first, so that they are page-aligned without holes;
    then by element size, largest first, so that each is aligned to its elements; within these in
    layout order, a rank's own tensors last.
    """
    boxes = boxes or LayoutBoxes(layout)
    found: dict[str, list[tuple[tuple[int, int], Entry]]] = {}

    def add(name: str, group: str, dtype: str, kind: str, shape: Sequence[int], box: Box) -> None:
        nbytes = box.numel * DTYPE_NBYTES[dtype]
        paged = nbytes > 0 and nbytes % PAGE_NBYTES == 0
        rank_in_file = (0, 0) if paged else (1, -DTYPE_NBYTES[dtype])
        whole = box == whole_box(shape)
        entry = Entry(name, file_key(group, name, box, shape), group, dtype, kind, box, 0, nbytes, whole)
        found.setdefault(group, []).append((rank_in_file, entry))

    for tensor in layout.tensors:
        for box in boxes.owned(tensor, rank):
            add(tensor.name, tensor.group, tensor.dtype, tensor.kind, tensor.shape, box)
    for own in rank_tensors:
        add(own.name, "state", own.dtype, own.kind, own.shape, whole_box(own.shape))

    tables: dict[str, list[Entry]] = {}
    for group in GROUPS:
        if group not in found:
            continue
        offset, table = 0, []
        for _, entry in sorted(found[group], key=lambda item: item[0]):
            table.append(msgspec.structs.replace(entry, offset=offset))
            offset += entry.nbytes
        tables[group] = table
    return tables
