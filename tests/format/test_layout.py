"""ckpt.format.layout: the tensor table, checked before any arithmetic is done on it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import BadInputError, DamagedError
from ckpt.format import records
from ckpt.format.layout import Layout, Mesh, Tensor, decode_layout, encode_layout, layout_key, nesting

W = Tensor("model.w", "model", "float32", (8, 2), 0, ("R", "S0"), (0, 1))
MESHES = (Mesh((2, 2), (0, 1, 2, 3)), Mesh((4,), (0, 1, 2, 3)))
LAYOUT = Layout(
    "ckpt/1",
    MESHES,
    (W, Tensor("state.x.%i0", "state", "bool", (), 1, ("R",), (3,), "ndarray")),
    {"model.tied": "model.w"},
)


def decode_anyhow(layout: Layout) -> Layout:
    raw = records.encode(layout)
    return decode_layout(raw, records.digest(raw))


def test_round_trip():
    """A layout comes back under its own digest; the same layout has the same bytes."""
    digest, raw = encode_layout(LAYOUT)
    assert decode_layout(raw, digest) == LAYOUT
    assert encode_layout(LAYOUT) == (digest, raw)
    assert layout_key(digest) == f"layouts/{digest}.json"


def test_another_digest():
    """Bytes that are not the ones asked for are refused, whatever they say."""
    digest, raw = encode_layout(LAYOUT)
    with pytest.raises(DamagedError, match="its name says"):
        decode_layout(raw + b" ", digest)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"name": ""}, "no name by the escaping rule"),
        ({"name": "model.w[0:4]"}, "no name by the escaping rule"),
        ({"name": "model..w"}, "no name by the escaping rule"),
        ({"name": "model.__metadata__"}, "no name by the escaping rule"),
        ({"name": "w"}, "expected a name that starts with 'model.'"),
        ({"group": "weights"}, "the group 'weights'"),
        ({"group": "../x"}, "the group"),
        ({"dtype": "qint8"}, "the dtype 'qint8'"),
        ({"dtype": "torch.float32"}, "the dtype"),
        ({"kind": "pickle"}, "the kind 'pickle'"),
        ({"kind": "ndarray", "dtype": "bfloat16"}, "the kind 'ndarray' of dtype bfloat16"),
        ({"shape": (-1, 2)}, "a dimension of size -1"),
        ({"shape": (2**63, 2)}, "a dimension of size of 64 bits"),
        ({"shape": (2**40, 2**40)}, "bytes in all of"),
        ({"shape": (2**40, 0, 2**40)}, "bytes in all of"),
        ({"shape": (2,) * 65}, "65 dimensions"),
        ({"mesh": 2}, "a mesh that is not there"),
        ({"mesh": -1}, "a mesh that is not there"),
        ({"mesh": 1}, "2 placements on a mesh of 1 dimensions"),
        ({"placements": ("R",)}, "1 placements on a mesh of 2"),
        ({"placements": ("R", "S2")}, "the placements"),
        ({"placements": ("R", "S-1")}, "the placements"),
        ({"placements": ("R", "S00")}, "the placements"),
        ({"placements": ("R", "P")}, "the placements"),
        ({"placements": ("R", "S0/2")}, "the placements"),
        ({"placements": ("S0/3", "S0"), "owners": (0,)}, "the placements"),
        ({"placements": ("R", "S0/" + "9" * 5000)}, "the placements"),
        ({"placements": ("R", "S" + "9" * 5000)}, "the placements"),
        ({"shape": (), "owners": (0,)}, "the placements"),
        ({"owners": (2,)}, "an owner that is no replica; expected 0 to 1"),
        ({"owners": (-1,)}, "an owner that is no replica"),
        ({"owners": (0,) * 9}, "9 pieces of the shape"),
        ({"shape": (), "placements": ("R", "R"), "owners": (0, 1)}, "2 pieces of the shape"),
    ],
)
def test_refuses_tensors(tensor, words):
    """An impossible tensor is refused by name; nor is one ever written."""
    wrong = replace(LAYOUT, tensors=(replace(W, **tensor), LAYOUT.tensors[1]), aliases={})
    with pytest.raises(DamagedError, match=words) as caught:
        decode_anyhow(wrong)
    assert str(caught.value).startswith("layouts/")
    assert len(str(caught.value)) < 1000
    with pytest.raises(BadInputError, match=words):
        encode_layout(wrong)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"name": "model.v["}, "no name by the escaping rule"),
        ({"name": "model.w"}, "listed twice"),
        ({"owners": (0, 2)}, "an owner that is no replica; expected 0 to 1"),
        ({"owners": (0,) * 9}, "9 pieces of the shape"),
        ({"dtype": "qint8"}, "the dtype"),
        ({"shape": (8, -2)}, "a dimension of size -2"),
        ({"kind": "ndarray", "dtype": "bfloat16"}, "the kind"),
        ({"mesh": 1}, "2 placements on a mesh of 1"),
        ({"placements": ("R", "S2")}, "the placements"),
    ],
)
def test_a_tensor_like_a_good_one_is_refused_for_what_differs(second, words):
    """That the first of a form was good says nothing of a second one's name, owners or other form."""
    wrong = replace(LAYOUT, tensors=(W, replace(W, **({"name": "model.v"} | second))), aliases={})
    with pytest.raises(DamagedError, match=words):
        decode_anyhow(wrong)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"meshes": (Mesh((), (0,)), MESHES[1])}, "mesh 0: 0 dimensions"),
        ({"meshes": (Mesh((2, 2), (0, 1, 2)), MESHES[1])}, "mesh 0: 3 ranks in the shape"),
        ({"meshes": (Mesh((2, 0), ()), MESHES[1])}, "mesh 0: a side of 0"),
        ({"meshes": (Mesh((-2, -2), (0, 1, 2, 3)), MESHES[1])}, "mesh 0: a side of -2"),
        ({"meshes": (Mesh((2, 2), (0, 1, 1, 3)), MESHES[1])}, "mesh 0: a rank in two places"),
        ({"meshes": (Mesh((2, 2), (0, 1, -1, 3)), MESHES[1])}, "mesh 0: rank -1"),
        ({"meshes": (Mesh((2, 2), (0, 1, 2**70, 3)), MESHES[1])}, "mesh 0: rank of 71 bits"),
        ({"meshes": (Mesh((2**23,) * 5, (0,)), MESHES[1])}, "mesh 0: 1 ranks"),
        ({"tensors": (*LAYOUT.tensors, W)}, "tensor 'model.w': listed twice"),
        ({"aliases": {"model.w": "model.w"}}, "alias 'model.w': a tensor's name"),
        ({"aliases": {"model.v": "model.u"}}, "alias 'model.v': stands for 'model.u'"),
        ({"aliases": {"model.v[": "model.w"}}, "alias"),
    ],
)
def test_refuses_layouts(change, words):
    """Impossible meshes, repeated names and aliases of nothing are refused."""
    with pytest.raises(DamagedError, match=words):
        decode_anyhow(replace(LAYOUT, **change))


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "order"),
    [
        ((2,), ("R",), ()),
        ((2,), ("S1",), ((0, 1),)),
        ((2, 3), ("S0", "S0"), ((0, 0), (1, 0))),
        ((2, 3), ("S0/3", "S0"), ((1, 0), (0, 0))),
        ((2, 3), ("S1", "S0"), ((1, 0), (0, 1))),
        ((5, 2, 3), ("R", "S0/3", "S0"), ((2, 0), (1, 0))),
        ((4, 3, 2), ("S0/2", "S0/2", "S0"), ((2, 0), (0, 0), (1, 0))),
        ((4, 3, 2), ("S0/6", "S0/2", "S0"), ((2, 0), (1, 0), (0, 0))),
        ((4, 3, 2), ("S0/6", "S0", "S0"), ((1, 0), (2, 0), (0, 0))),
        ((4, 3, 2), ("S0/3", "S0", "S0"), ((1, 0), (0, 0), (2, 0))),
        ((4, 3, 2), ("S0/2", "S1", "S0"), ((2, 0), (0, 0), (1, 1))),
        ((2, 1), ("S0", "S0"), ((0, 0), (1, 0))),
        ((4, 3), ("S0/2", "S0"), None),
        ((4, 3), ("S0", "S0/2"), None),
        ((4,), ("S0/4",), None),
    ],
)
def test_nesting(mesh_shape, placements, order):
    """The order in which shards of one dimension are cut, as SPEC.md tells it."""
    assert nesting(mesh_shape, placements) == order


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_nesting_is_torchs(mesh_shape, random):
    """For any order of cutting, torch's own placements give that order back (places of size 1 aside)."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    class FakeMesh:
        def size(self, dimension):
            return mesh_shape[dimension]

    order = list(range(len(mesh_shape)))
    random.shuffle(order)
    placements = DTensorSpec._convert_shard_order_to_StridedShard(
        (ShardOrderEntry(tensor_dim=0, mesh_dims=tuple(order)),), (Shard(0),) * len(order), FakeMesh()
    )
    words = tuple(f"S0/{p.split_factor}" if hasattr(p, "split_factor") else "S0" for p in placements)
    found = nesting(tuple(mesh_shape), words)
    assert found is not None
    assert [m for m, _ in found if mesh_shape[m] > 1] == [m for m in order if mesh_shape[m] > 1]


def test_large_layouts_are_checked_quickly():
    """18,000 tensors on a mesh of 4,096 ranks take well under a second."""
    mesh = Mesh((64, 64), tuple(range(4096)))
    names = [f"optimizer.state.exp_avg.layers.{i}.attn.wq.weight" for i in range(18_000)]
    tensors = tuple(Tensor(n, "optimizer", "float32", (4096, 4096), 0, ("S0", "S1"), (0,)) for n in names)
    digest, raw = encode_layout(Layout("ckpt/1", (mesh,), tensors, {}))
    start = time.perf_counter()
    decode_layout(raw, digest)
    assert time.perf_counter() - start < 3.0
