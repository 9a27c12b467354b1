"""What verify checks without reading: headers, tilings and indexes against what a layout says. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from ckpt.format.layout import Tensor
from ckpt.format.safetensors import StoredEntry, st_dtype
from ckpt.plan.boxes import Box, LayoutBoxes, whole_box
from ckpt.reading.shards import FileShards

Found = tuple[str | None, str]  # tensor (or key), what is wrong


def header_problems(stored: Sequence[StoredEntry], shards: FileShards) -> Iterator[Found]:
    """Where a parsed safetensors header is not the one that the layout makes."""
    found = {entry.key: (entry.dtype, entry.shape, entry.begin, entry.end) for entry in stored}
    expected = {}
    for placed in shards.shards:
        entry = placed.entry
        expected[entry.key] = (*st_dtype(entry.dtype, entry.box.sizes), entry.offset, entry.offset + entry.nbytes)
    for key in sorted({*found, *expected}):
        if key not in expected:
            yield key, "in the header, not in the layout"
        elif key not in found:
            yield key, "in the layout, not in the header"
        elif found[key] != expected[key]:
            yield key, f"the header has {_entry_text(*found[key])}, the layout {_entry_text(*expected[key])}"


def _entry_text(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    return f"{dtype} {list(shape)} at {begin} to {end}"


def index_problems(raw: bytes, there: Mapping[str, set[str]]) -> Iterator[Found]:
    """Where a Hugging Face index does not name exactly the model's tensors, each in a file that has it.

    ``there``: key in a model file -> the files that have it.
    """
    try:
        named = {str(key): str(file) for key, file in json.loads(raw)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield None, "not a readable index"
        return
    for key in sorted({*named, *there}):
        if key not in there:
            yield key, f"points to {named[key]}, which does not have it"
        elif key not in named:
            yield key, "is not named"
        elif named[key] not in there[key]:
            yield key, f"points to {named[key]}, it is in {', '.join(sorted(there[key]))}"


def layout_problems(boxes: LayoutBoxes) -> Iterator[Found]:
    """Tensors of a layout whose shards do not make them up, by arithmetic alone."""
    layout = boxes.layout
    known: dict[tuple[object, ...], str | None] = {}  # layers are alike: few tilings are different
    for tensor in layout.tensors:
        if tensor.owners:
            pattern = (tensor.mesh, tensor.placements, tensor.shape, tensor.owners)
            if pattern not in known:
                known[pattern] = _untiled(boxes, tensor)
            what = known[pattern]
            if what is not None:
                yield tensor.name, what


def _untiled(boxes: LayoutBoxes, tensor: Tensor) -> str | None:
    """Why the shards of a tensor do not make it up; None when they do."""
    mesh = boxes.layout.meshes[tensor.mesh]
    whole = whole_box(tensor.shape)
    pieces = [box for rank in mesh.ranks for box in boxes.owned(tensor, rank)]
    if not whole.numel:
        return None if pieces == [whole] else f"an empty tensor written {len(pieces)} times"
    filled = sum(box.numel for box in pieces)
    if filled != whole.numel:
        return f"its shards have {filled} elements, the tensor {whole.numel}"
    overlap = _overlap(sorted(pieces))
    return None if overlap is None else f"its shards {overlap[0]} and {overlap[1]} overlap"


def _overlap(pieces: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the sorted boxes that overlap; only boxes that share a row of dimension 0 are compared."""
    near: list[Box] = []
    for box in pieces:
        near = [other for other in near if not box.sizes or other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in near:
            if other.intersect(box) is not None:
                return other, box
        near.append(box)
    return None
