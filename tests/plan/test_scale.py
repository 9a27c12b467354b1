"""The whole plan of small worlds against brute force: what makes it quick at 16,384 ranks must not make it wrong."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings

from ckpt.format.layout import Layout, Mesh, Tensor, decode_layout, encode_layout
from ckpt.format.part import RankTensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, LayoutBoxes, local_box, whole_box
from ckpt.plan.files import GROUPS, Entry, file_key, file_tables
from ckpt.plan.load import Placed, Shares, entry_reads
from ckpt.plan.save import Group, LocalTensor, Structure, plan_layouts
from tests.plan.test_boxes import layouts

SHAPES = ((40, 6), (16,), (5, 3), (33,), (), (2, 0), (64, 4), (7, 2, 3))
MESHES: dict[str, tuple[tuple[int, ...] | None, tuple[str, ...]]] = {
    "fsdp": ((16,), ("S0",)),
    "hsdp": ((4, 4), ("R", "S0")),
    "ddp": (None, ()),
}


def structure(kind: str, world: int = 16) -> Structure:
    """Three tensors of each shape, two of them optimizer state; scalars are plain, whatever the kind."""
    mesh_shape, placements = MESHES[kind]
    if mesh_shape is not None and world != 16:
        mesh_shape = (world,)
    tensors = []
    for group, prefix, dtype in (
        ("model", "model.", "bfloat16"),
        ("optimizer", "optimizer.m.", "float32"),
        ("optimizer", "optimizer.v.", "float64"),
    ):
        for i, shape in enumerate(SHAPES):
            ranks = tuple(range(world))  # an object of its own for every tensor
            if mesh_shape is None or not shape:
                tensors.append(LocalTensor(f"{prefix}{i}", group, dtype, shape))
            else:
                tensors.append(LocalTensor(f"{prefix}{i}", group, dtype, shape, mesh_shape, ranks, placements))
    return Structure(tuple(tensors), {"model.tied": "model.0"})


def layout_of(kind: str) -> Layout:
    """The layout that all 16 ranks share."""
    (layout,) = plan_layouts([Group(structure(kind), tuple(range(16)))])
    return layout


def slices(box: Box) -> tuple[slice, ...]:
    """A box as numpy takes it."""
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))


@pytest.mark.parametrize("kind", MESHES)
def test_every_element_is_written_once(kind: str) -> None:
    """By the tables of all ranks together; empty tensors once, too."""
    layout = layout_of(kind)
    written = {tensor.name: np.zeros(tensor.shape, int) for tensor in layout.tensors}
    entries = {tensor.name: 0 for tensor in layout.tensors}
    for rank in range(16):
        for group, table in file_tables(layout, rank).items():
            position = 0
            for entry in table:
                assert (entry.offset, entry.group) == (position, group)
                position += entry.nbytes
                written[entry.name][slices(entry.box)] += 1
                entries[entry.name] += 1
    assert all((counts == 1).all() for counts in written.values())
    assert all(entries[tensor.name] == 1 for tensor in layout.tensors if prod(tensor.shape) == 0)
    assert len(layout.meshes) == (2 if kind == "hsdp" else 1)  # equal grids are one mesh, whose ranks stand there once


@pytest.mark.parametrize("kind", MESHES)
def test_the_layout_is_one_that_readers_take(kind: str) -> None:
    """And comes back as it was."""
    layout = layout_of(kind)
    digest, raw = encode_layout(layout)
    assert decode_layout(raw, digest) == layout


def plain_tables(layout: Layout, rank: int, own: tuple[RankTensor, ...]) -> dict[str, list[Entry]]:
    """What SPEC.md says of the order of a file, one shard at a time."""
    found = [(t, box, t.group) for t in layout.tensors if t.owners for box in LayoutBoxes(layout).owned(t, rank)] + [
        (t, whole_box(t.shape), "state") for t in own
    ]

    def place(item: tuple[Tensor | RankTensor, Box, str]) -> tuple[int, int]:
        tensor, box, _ = item
        nbytes = box.numel * DTYPE_NBYTES[tensor.dtype]
        return (0, 0) if nbytes and nbytes % 4096 == 0 else (1, -DTYPE_NBYTES[tensor.dtype])

    tables: dict[str, list[Entry]] = {}
    for group in GROUPS:
        offset = 0
        for tensor, box, _ in sorted((item for item in found if item[2] == group), key=place):
            nbytes = box.numel * DTYPE_NBYTES[tensor.dtype]
            key = file_key(group, tensor.name, box, tensor.shape)
            whole = box == whole_box(tensor.shape)
            entry = Entry(tensor.name, key, group, tensor.dtype, tensor.kind, box, offset, nbytes, whole)
            tables.setdefault(group, []).append(entry)
            offset += nbytes
    return tables


@pytest.mark.parametrize("kind", MESHES)
def test_tables_are_those_of_the_specification(kind: str) -> None:
    """For every rank, with tensors of its own, on a mesh with page-filling shards among others."""
    layout = layout_of(kind)
    paged = Tensor("state.paged", "state", "float32", (16, 1024), 0, layout.tensors[0].placements, (0,))
    layout = Layout(layout.format, layout.meshes, (*layout.tensors, paged), layout.aliases)
    own = (RankTensor("a", "uint8", (4096,)), RankTensor("b", "float32", (3,)))
    for rank in range(16):
        assert file_tables(layout, rank, own) == plain_tables(layout, rank, own)


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_tables_of_any_mesh_are_those_of_the_specification(layout: Layout) -> None:
    """Random placements and owners; a second tensor is cut as the first one is."""
    other = Tensor("u", "state", "float32", *_cut(layout.tensors[0]))
    both = Layout(layout.format, layout.meshes, (*layout.tensors, other), {})
    for rank in (*layout.meshes[0].ranks, 99):  # 99 is in no mesh
        assert file_tables(both, rank) == plain_tables(both, rank, ())


def _cut(tensor: Tensor) -> tuple[tuple[int, ...], int, tuple[str, ...], tuple[int, ...]]:
    return tensor.shape, tensor.mesh, tensor.placements, tensor.owners


@pytest.mark.parametrize("kind", MESHES)
def test_a_job_of_another_size_reads_exactly_its_boxes(kind: str) -> None:
    """16 ranks wrote numbers into files of memory; each of 15 ranks reads its boxes of them, by the plan."""
    layout = layout_of(kind)
    boxes = LayoutBoxes(layout)
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    whole = {name: np.arange(prod(t.shape)).reshape(t.shape) for name, t in tensors.items()}
    placed = {rank: _placed(layout, rank) for rank in range(16)}
    shares = Shares(boxes)
    for rank in range(15):
        for local in structure("fsdp", 15).tensors:
            tensor = tensors[local.name]
            need = whole_box(tensor.shape)
            if local.mesh_shape is not None and local.mesh_ranks is not None:
                need = local_box(Mesh(local.mesh_shape, local.mesh_ranks), local.placements, tensor.shape, rank)
            target = np.full(need.sizes, -1)
            for found in shares.of(tensor, need):
                at = placed[found.rank][tensor.name, found.piece]
                stored = whole[tensor.name][slices(found.piece)].ravel()
                reads = [cut.read(found.rank, at) for cut in found.cuts]
                assert reads == list(entry_reads(found.rank, at, need))
                for read in reads:
                    itemsize = DTYPE_NBYTES[tensor.dtype]
                    start = (read.offset - read.entry.offset) // itemsize
                    chunk = stored[start : start + read.nbytes // itemsize]
                    if read.target_offset is not None:
                        target.ravel()[read.target_offset // itemsize :][: len(chunk)] = chunk
                    for copy in read.copies:
                        source = chunk[copy.start : copy.start + copy.source.numel].reshape(copy.source.sizes)
                        within = slices(copy.box.relative_to(copy.source))
                        target[slices(copy.box.relative_to(need))] = source[within]
            assert np.array_equal(target, whole[tensor.name][slices(need)])
            assert sum(found.numel for found in shares.of(tensor, need)) == need.numel


def _placed(layout: Layout, rank: int) -> dict[tuple[str, Box], Placed]:
    return {(e.name, e.box): Placed(e, 0) for table in file_tables(layout, rank).values() for e in table}


def test_shares_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked before is worked out again, and is the same."""
    monkeypatch.setattr("ckpt.plan.load.KNOWN_SHARES", 3)
    layout = layout_of("fsdp")
    shares = Shares(LayoutBoxes(layout))
    asked = [tensor for tensor in layout.tensors if tensor.shape]
    first = [list(shares.of(tensor, whole_box(tensor.shape))) for tensor in asked]
    assert [list(shares.of(tensor, whole_box(tensor.shape))) for tensor in asked] == first
    assert len(shares._known) < len(asked)


def variants(structure: Structure) -> Iterator[Structure]:
    """The same structure with one thing changed."""
    first, *rest = structure.tensors
    for change in (
        {"name": "model.other"},
        {"group": "state"},
        {"dtype": "float32"},
        {"shape": (40, 7)},
        {"mesh_shape": (2, 8), "placements": ("R", "S0")},
        {"mesh_ranks": tuple(reversed(range(16)))},
        {"placements": ("S1",)},
        {"kind": "ndarray"},
        {"first_rank_owns": True},
    ):
        fields = {name: getattr(first, name) for name in first.__struct_fields__}
        yield Structure((LocalTensor(**(fields | change)), *rest), structure.aliases)  # type: ignore[arg-type]
    yield Structure(structure.tensors, {"model.tied": "model.1"})
    yield Structure(tuple(rest), structure.aliases)
    yield Structure((rest[0], first, *rest[1:]), structure.aliases)


def test_the_digest_of_a_structure_is_of_all_that_it_says() -> None:
    """Equal structures have one, though their meshes are other objects; any change gives another."""
    plain = structure("fsdp")
    digests = [plain.digest(), *(changed.digest() for changed in variants(plain))]
    assert len(set(digests)) == len(digests)
    assert structure("fsdp").digest() == digests[0]
    ranks = plain.tensors[0].mesh_ranks
    shared = tuple(
        LocalTensor(t.name, t.group, t.dtype, t.shape, t.mesh_shape, t.mesh_ranks and ranks, t.placements)
        for t in plain.tensors
    )
    assert Structure(shared, plain.aliases).digest() == digests[0]
