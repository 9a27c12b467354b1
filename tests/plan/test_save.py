"""Who writes what: balanced, once, the same on every rank, and refused by name where ranks disagree."""

from __future__ import annotations

import json

import pytest

from ckpt.errors import BadInputError
from ckpt.plan.files import file_tables
from ckpt.plan.save import Group, LocalTensor, Structure, hf_index, plan_layouts


def plain(name: str, *shape: int, group: str = "model", first: bool = False) -> LocalTensor:
    """A plain float32 tensor."""
    return LocalTensor(name, group, "float32", shape, first_rank_owns=first)


def written(layout_ranks: tuple[int, ...], tensors: list[LocalTensor]) -> list[int]:
    """Bytes that each rank writes."""
    (layout,) = plan_layouts([Group(Structure(tuple(tensors), {}), layout_ranks)])
    return [sum(e.nbytes for table in file_tables(layout, r).values() for e in table) for r in layout_ranks]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_replicas_are_written_once_and_balanced(world: int) -> None:
    """A DDP model, one large embedding among it: max / mean stays under 1.1."""
    tensors = [plain("model.emb", 5000, 64)] + [plain(f"model.{i}.w", 64, 64) for i in range(40)]
    nbytes = written(tuple(range(world)), tensors)
    assert sum(nbytes) == 4 * (5000 * 64 + 40 * 64 * 64)
    assert max(nbytes) / (sum(nbytes) / world) < 1.1


def test_even_replicas_are_not_cut() -> None:
    """Where whole tensors balance well enough they stay whole, so that the folder is a Hugging Face folder."""
    tensors = [plain(f"model.{i}.w", 64, 64) for i in range(40)]
    (layout,) = plan_layouts([Group(Structure(tuple(tensors), {}), (0, 1))])
    assert all(len(tensor.owners) == 1 for tensor in layout.tensors)
    index = json.loads(hf_index([layout], 2) or b"{}")
    assert sorted(index["weight_map"]) == sorted(t.name.removeprefix("model.") for t in tensors)
    assert set(index["weight_map"].values()) == {f"model-{r:05d}-of-00002.safetensors" for r in range(2)}


def test_first_rank_owns_what_it_must() -> None:
    """DDP buffers: rank 0's copy is the truth."""
    (layout,) = plan_layouts([Group(Structure((plain("model.a", 8), plain("model.b", 8, first=True)), {}), (0, 1))])
    assert {t.name: t.owners for t in layout.tensors}["model.b"] == (0,)


def test_a_name_in_two_structures_is_written_by_the_first() -> None:
    """Pipeline stages share a tied embedding: one of them writes it."""
    stage0 = Structure((plain("model.emb", 4, 4), plain("model.0.w", 4)), {})
    stage1 = Structure((plain("model.emb", 4, 4), plain("model.1.w", 4)), {})
    layouts = plan_layouts([Group(stage0, (0,)), Group(stage1, (1,))])
    assert [[t.name for t in layout.tensors if t.owners] for layout in layouts] == [
        ["model.emb", "model.0.w"],
        ["model.1.w"],
    ]


def test_a_mesh_across_two_structures_is_written_by_all_its_ranks() -> None:
    """One rank has a buffer more: the others still write their shards of what all of them hold."""
    shared = LocalTensor("model.w", "model", "float32", (8, 2), (2,), (0, 1), ("S0",))
    layouts = plan_layouts(
        [Group(Structure((shared, plain("model.only", 3)), {}), (0,)), Group(Structure((shared,), {}), (1,))]
    )
    written_by = [
        [(entry.name, entry.nbytes) for table in file_tables(layout, rank).values() for entry in table]
        for rank, layout in enumerate(layouts)
    ]
    assert written_by == [[("model.w", 32), ("model.only", 12)], [("model.w", 32)]]


def test_one_name_of_two_shapes_is_refused_by_name() -> None:
    """The message gives both shapes and ranks, and says what to do."""
    groups = [Group(Structure((plain("model.a", 3),), {}), (0,)), Group(Structure((plain("model.a", 4),), {}), (1,))]
    with pytest.raises(BadInputError, match=r"per_rank.*model\.a: float32\[3\] on rank 0, float32\[4\] on rank 1"):
        plan_layouts(groups)


def test_sharded_tensors_make_no_hf_index() -> None:
    """A folder with cut model tensors does not claim to be a Hugging Face folder."""
    sharded = LocalTensor("model.a", "model", "float32", (4,), (2,), (0, 1), ("S0",))
    assert hf_index(plan_layouts([Group(Structure((sharded,), {}), (0, 1))]), 2) is None


def test_page_filling_shards_come_first_then_larger_elements() -> None:
    """The file order that SPEC.md states."""
    tensors = (
        LocalTensor("a", "state", "uint8", (3,)),
        LocalTensor("b", "state", "float64", (5,)),
        LocalTensor("c", "state", "float32", (1024,)),
        LocalTensor("d", "state", "bfloat16", (7,)),
        LocalTensor("e", "state", "float64", ()),
    )
    (layout,) = plan_layouts([Group(Structure(tensors, {}), (0,))])
    table = file_tables(layout, 0)["state"]
    assert [entry.name for entry in table] == ["c", "b", "e", "d", "a"]
    assert [entry.offset for entry in table] == [0, 4096, 4136, 4144, 4158]
