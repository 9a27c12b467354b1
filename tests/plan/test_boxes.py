"""Box arithmetic: shards tile, holders find exactly what overlaps, and torch's DTensor agrees."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import BadInputError
from ckpt.format.layout import Layout, Mesh, Tensor
from ckpt.plan.boxes import Box, LayoutBoxes, chunk_bounds, local_box, sharding_order, unravel, whole_box


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of one tensor on a random mesh, with random placements and owners."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    world = prod(mesh_shape)
    ranks = tuple(draw(st.permutations(range(world))))
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    word = st.one_of(st.just("R"), st.integers(0, len(shape) - 1).map(lambda d: f"S{d}"))
    placements = tuple(draw(st.lists(word, min_size=len(mesh_shape), max_size=len(mesh_shape))))
    replicas = prod(n for n, p in zip(mesh_shape, placements, strict=True) if p == "R")
    owners = tuple(draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=3)))
    tensor = Tensor("t", "state", "float32", shape, 0, placements, owners)
    return Layout("ckpt/1", (Mesh(mesh_shape, ranks),), (tensor,), {})


def cells(box: Box) -> set[tuple[int, ...]]:
    """Every element of a box."""
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))))


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_owned_boxes_tile_the_tensor(layout: Layout) -> None:
    """Every element is written exactly once, by a rank that holds it."""
    tensor, boxes = layout.tensors[0], LayoutBoxes(layout)
    written: list[tuple[int, ...]] = []
    for rank in layout.meshes[0].ranks:
        held = cells(local_box(layout.meshes[0], tensor.placements, tensor.shape, rank))
        for box in boxes.owned(tensor, rank):
            assert cells(box) <= held
            written.extend(cells(box))
    assert sorted(written) == sorted(cells(whole_box(tensor.shape)))


@given(layouts(), st.data())
@settings(max_examples=300, deadline=None)
def test_holders_are_the_owned_boxes_that_overlap(layout: Layout, data: st.DataObject) -> None:
    """The pruned walk finds what trying every rank would find."""
    tensor, boxes = layout.tensors[0], LayoutBoxes(layout)
    offsets = tuple(data.draw(st.integers(0, max(0, n - 1))) for n in tensor.shape)
    sizes = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(tensor.shape, offsets, strict=True))
    need = Box(offsets, sizes)
    expected = {
        (rank, box)
        for rank in layout.meshes[0].ranks
        for box in boxes.owned(tensor, rank)
        if box.numel and need.numel and box.intersect(need) is not None
    }
    found = list(boxes.holders(tensor, need))
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize(("length", "pieces"), [(0, 3), (1, 4), (5, 4), (6, 4), (7, 3), (8, 2)])
def test_chunk_bounds_follow_torch_chunk(length: int, pieces: int) -> None:
    """The rows of place i are those of torch.chunk, and empty behind its last chunk."""
    import torch

    chunks = [c.tolist() for c in torch.arange(length).chunk(pieces)] if length else []
    expected = chunks + [[]] * (pieces - len(chunks))
    assert [list(range(*chunk_bounds(length, pieces, i))) for i in range(pieces)] == expected


def test_strided_shards_nest_inside_the_plain_shard_to_their_right() -> None:
    """FSDP over tensor parallelism: the tp cut comes first, the fsdp cut inside it."""
    assert sharding_order((2, 2), ("S0/2", "S0")) == ((1, 0), (0, 0))
    assert sharding_order((2, 2), ("S0", "S0")) == ((0, 0), (1, 0))
    assert sharding_order((2, 2, 2, 2), ("R", "S0/2", "S1", "S0")) == ((3, 0), (1, 0), (2, 1))
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    rows = [local_box(mesh, ("S0/2", "S0"), (8, 3), rank).offsets[0] for rank in range(4)]
    assert rows == [0, 4, 2, 6]


def test_rank_outside_of_the_mesh_is_refused() -> None:
    """The message names the rank and the mesh."""
    with pytest.raises(BadInputError, match=r"rank 7 is not in the mesh of ranks \[0, 1\]"):
        local_box(Mesh((2,), (0, 1)), ("S0",), (4,), 7)


def test_unravel_is_row_major() -> None:
    """The last dimension runs fastest."""
    assert [unravel(i, (2, 3)) for i in range(6)] == list(itertools.product(range(2), range(3)))
