"""ckpt.plan.replicas: which ranks hold the same bytes, by arithmetic, against boxes counted one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.layout import Mesh
from ckpt.plan.boxes import local_box
from ckpt.plan.replicas import replica_sets
from ckpt.plan.save import Group, LocalTensor, Structure, plan_layouts

SHAPE = (12, 12, 12)


def local(name, mesh=None, ranks=None, placements=()):
    return LocalTensor(name, "state", "float32", SHAPE, mesh, ranks, placements)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(
        lambda mesh: st.tuples(
            st.just(tuple(mesh)),
            st.permutations(range(100, 100 + _product(mesh))),
            st.permutations(["R", "S0", "S1", "S2"][: len(mesh) + 1]),
        )
    )
)
def test_sets_are_those_with_equal_boxes(case):
    """Any mesh, any order of its ranks, any placements: the ranks of a set have one box, and all that have it."""
    mesh, ranks, words = case
    placements = tuple(words[: len(mesh)])
    ranks = tuple(rank - 100 for rank in ranks)
    (layout,) = plan_layouts([Group(Structure((local("w", mesh, ranks, placements),), {}), tuple(sorted(ranks)))])
    for rank in ranks:
        found = replica_sets([layout], 0, rank)
        box = local_box(Mesh(mesh, ranks), placements, SHAPE, rank)
        same = tuple(sorted(r for r in ranks if local_box(Mesh(mesh, ranks), placements, SHAPE, r) == box))
        assert (found.sets[found.mine["w"]] if "w" in found.mine else (rank,)) == same
        assert found.sets == tuple(sorted(set(found.sets)))


def _product(mesh):
    total = 1
    for side in mesh:
        total *= side
    return total


def test_plain_and_hybrid():
    """HSDP on 2 x 2: two sets for the sharded weight, one of all ranks for what is plain."""
    tensors = (local("w", (2, 2), (0, 1, 2, 3), ("R", "S0")), local("step"))
    (layout,) = plan_layouts([Group(Structure(tensors, {}), (0, 1, 2, 3))])
    found = [replica_sets([layout], 0, rank) for rank in range(4)]
    assert found[0].sets == ((0, 1, 2, 3), (0, 2), (1, 3))
    assert [dict(one.mine) for one in found] == [{"w": 1, "step": 0}, {"w": 2, "step": 0}] * 2


def test_stages_share_what_both_have():
    """A plain tensor in two layouts is shared by the ranks of both, one in a single layout by its own."""
    first = Structure((local("both"), local("first")), {})
    second = Structure((local("both"), local("second")), {})
    layouts = plan_layouts([Group(first, (0, 1)), Group(second, (2,))])
    assert [layout.tensors[0].owners for layout in layouts] == [(0,), ()]
    found = [replica_sets(layouts, int(rank == 2), rank) for rank in range(3)]
    assert found[0].sets == ((0, 1), (0, 1, 2))
    assert [dict(one.mine) for one in found] == [{"both": 1, "first": 0}, {"both": 1, "first": 0}, {"both": 1}]


def test_nothing_is_shared():
    """One rank, and fully sharded ones."""
    (layout,) = plan_layouts([Group(Structure((local("w"),), {}), (0,))])
    assert replica_sets([layout], 0, 0).sets == ()
    (layout,) = plan_layouts([Group(Structure((local("w", (2,), (0, 1), ("S0",)),), {}), (0, 1))])
    assert replica_sets([layout], 0, 1).sets == ()
