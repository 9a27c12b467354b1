"""A layout: the table of tensors of a group of ranks of equal structure, content-addressed.

Where any box of any tensor lies is arithmetic on it (``ckpt.plan.boxes``); no name or
offset is stored twice.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import msgspec

from ckpt.errors import DamagedError
from ckpt.format import records
from ckpt.format.names import is_name
from ckpt.format.safetensors import DTYPE_NBYTES, MAX_DIMS, NUMPY_DTYPES

LAYOUTS = "layouts"
GROUPS = ("model", "optimizer", "state")  # in the order of a part's files
KINDS = ("tensor", "ndarray")

_PLACEMENT = re.compile(r"R|S(0|[1-9][0-9]?)(?:/([1-9][0-9]{0,17}))?")


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grid of ranks: ``shape`` and, in row-major order, the global rank at each place."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor: global ``shape``, true ``dtype`` (torch's name without ``torch.``), and who holds which box.

    ``placements`` has one word per dimension of the mesh: ``R`` (replicated), ``S0`` (dimension 0
    cut by torch.chunk's rule), ``S0/4`` (a strided shard: cut after the shards of the same
    dimension to its right). ``owners`` are replica indices: the box of every shard is cut along
    its dimension 0 into ``len(owners)`` pieces by the same rule, and piece i is written by
    replica ``owners[i]`` (row-major over the replicated mesh dimensions). No owners: another
    layout of the same step holds the bytes.
    """

    name: str
    group: str  # "model", "optimizer" or "state": which file of a rank it goes into
    dtype: str
    shape: tuple[int, ...]
    mesh: int  # index into Layout.meshes
    placements: tuple[str, ...]
    owners: tuple[int, ...]
    kind: str = "tensor"  # or "ndarray": comes back as a numpy array


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of a group of ranks, in state order, and the other names of tied ones."""

    format: str
    meshes: tuple[Mesh, ...]
    tensors: tuple[Tensor, ...]
    aliases: dict[str, str]  # other name -> the name in ``tensors``


def layout_key(layout_digest: str) -> str:
    """``layouts/<digest>.json``."""
    return f"{LAYOUTS}/{layout_digest}.json"


def encode_layout(layout: Layout) -> tuple[str, bytes]:
    """(digest, bytes) of a layout. BadInputError for one that no reader would take."""
    raw = records.encode_checked(layout, check_layout)
    return records.digest(raw), raw


def decode_layout(raw: bytes, layout_digest: str) -> Layout:
    """The layout in ``raw``, which must have the digest it was asked by."""
    where = layout_key(layout_digest)
    found = records.digest(raw)
    if found != layout_digest:
        raise DamagedError(f"{where}: digest {found}, its name says {layout_digest}")
    layout = records.decode(raw, Layout, where)
    check_layout(layout, where)
    return layout


def check_layout(layout: Layout, where: str) -> None:
    """DamagedError for a layout that no ckpt wrote, although it can be read.

    After it every index is in range, the arithmetic of boxes is defined, and every name is a name.
    """
    for index, mesh in enumerate(layout.meshes):
        _check_mesh(mesh, f"{where}: mesh {index}")
    names: set[str] = set()
    forms: dict[Any, _Form] = {}  # thousands of tensors have a few: each is checked once
    for tensor in layout.tensors:
        if tensor.name in names:
            raise records.damaged(_at(where, tensor), "listed twice", "once")
        names.add(tensor.name)
        _check_name(tensor, where)
        key = (tensor.dtype, tensor.shape, tensor.kind, tensor.mesh, tensor.placements)
        form = forms.get(key)
        if form is None:
            form = forms[key] = _checked_form(tensor, layout.meshes, _at(where, tensor))
        _check_owners(tensor, form, where)
    for alias, name in layout.aliases.items():
        at = f"{where}: alias {alias[:200]!r}"
        if alias in names or not is_name(alias):
            raise records.damaged(at, "a tensor's name, or none at all", "another name")
        if name not in names:
            raise records.damaged(at, f"stands for {name[:200]!r}", "the name of a tensor of this layout")


def check_typed_shape(dtype: str, shape: tuple[int, ...], kind: str, where: str) -> None:
    """DamagedError for a dtype, shape or kind that no stored tensor has."""
    if dtype not in DTYPE_NBYTES:
        raise records.damaged(where, f"the dtype {dtype[:64]!r}", f"one of {', '.join(DTYPE_NBYTES)}")
    if kind not in KINDS or (kind == "ndarray" and dtype not in NUMPY_DTYPES):
        raise records.damaged(where, f"the kind {kind[:64]!r} of dtype {dtype}", "tensor, or ndarray of a numpy dtype")
    if len(shape) > MAX_DIMS:
        raise records.damaged(where, f"{len(shape)} dimensions", f"at most {MAX_DIMS}")
    for size in shape:
        records.check_count(size, where, "a dimension of size")
    # Of the sizes that are not 0, so that no box of an empty tensor overflows either.
    records.check_count(prod(size or 1 for size in shape) * DTYPE_NBYTES[dtype], where, "bytes in all")


@lru_cache(maxsize=4096)
def nesting(mesh_shape: tuple[int, ...], placements: tuple[str, ...]) -> tuple[tuple[int, int], ...] | None:
    """``(mesh dimension, tensor dimension)`` of every shard, in the order in which they are cut, outermost first.

    The rule of torch's DTensor: mesh dimensions are looked at from right to left; ``S<d>`` goes
    before all that is already in the order of tensor dimension d, ``S<d>/<k>`` to the first place
    where the mesh sizes before it multiply to k. None when there is no such place.
    """
    orders: dict[int, list[int]] = {}
    for mesh_dimension in reversed(range(len(placements))):
        match = _PLACEMENT.fullmatch(placements[mesh_dimension])
        if match is None:
            return None
        if match[1] is None:
            continue
        order = orders.setdefault(int(match[1]), [])
        split = int(match[2] or 1)
        # The products of the first 0, 1, 2 ... sizes; each is made of the one before, for 64 dimensions are allowed.
        products = accumulate((mesh_shape[m] for m in order), mul, initial=1)
        place = next((i for i, product in enumerate(products) if product == split), None)
        if place is None:
            return None
        order.insert(place, mesh_dimension)
    return tuple((mesh_dimension, d) for d in sorted(orders) for mesh_dimension in orders[d])


def _check_mesh(mesh: Mesh, where: str) -> None:
    if not 1 <= len(mesh.shape) <= MAX_DIMS:
        raise records.damaged(where, f"{len(mesh.shape)} dimensions", f"1 to {MAX_DIMS}")
    for side in mesh.shape:
        records.check_count(side, where, "a side of", least=1, most=records.MAX_WORLD)
    if prod(mesh.shape) != len(mesh.ranks):
        raise records.damaged(where, f"{len(mesh.ranks)} ranks in the shape {list(mesh.shape)}", "one per place")
    for rank in (min(mesh.ranks), max(mesh.ranks)):  # there is one at least, as there are sides
        records.check_count(rank, where, "rank", most=records.MAX_WORLD - 1)
    if len(set(mesh.ranks)) != len(mesh.ranks):
        raise records.damaged(where, "a rank in two places", "each rank in one")


def _at(where: str, tensor: Tensor) -> str:
    return f"{where}: tensor {tensor.name[:200]!r}"


def _check_name(tensor: Tensor, where: str) -> None:
    if not is_name(tensor.name):
        raise records.damaged(_at(where, tensor), "no name by the escaping rule", "components joined by '.'")
    if tensor.group not in GROUPS:
        raise records.damaged(_at(where, tensor), f"the group {tensor.group[:64]!r}", f"one of {', '.join(GROUPS)}")
    if tensor.group != "state" and not tensor.name.startswith(f"{tensor.group}."):
        expected = f"a name that starts with {tensor.group + '.'!r}"
        raise records.damaged(_at(where, tensor), f"in the group {tensor.group}", expected)


class _Form(NamedTuple):
    """What a tensor's owners are checked against."""

    replicas: int
    pieces: int  # at most


def _checked_form(tensor: Tensor, meshes: tuple[Mesh, ...], where: str) -> _Form:
    check_typed_shape(tensor.dtype, tensor.shape, tensor.kind, where)
    if not 0 <= tensor.mesh < len(meshes):
        raise records.damaged(where, "a mesh that is not there", f"one of the {len(meshes)}")
    mesh = meshes[tensor.mesh]
    if len(tensor.placements) != len(mesh.shape):
        raise records.damaged(
            where, f"{len(tensor.placements)} placements on a mesh of {len(mesh.shape)} dimensions", "one per dimension"
        )
    order = nesting(mesh.shape, tensor.placements)
    if order is None or any(dimension >= len(tensor.shape) for _, dimension in order):
        raise records.damaged(
            where,
            f"the placements {[word[:64] for word in tensor.placements]} of {len(tensor.shape)} dimensions "
            f"on a mesh {list(mesh.shape)}",
            "R, S<dimension>, or S<dimension>/<split> with a split that the mesh makes",
        )
    replicas = prod(side for side, word in zip(mesh.shape, tensor.placements, strict=True) if word == "R")
    return _Form(replicas, max(1, tensor.shape[0]) if tensor.shape else 1)


def _check_owners(tensor: Tensor, form: _Form, where: str) -> None:
    owners = tensor.owners
    if owners and not (min(owners) >= 0 and max(owners) < form.replicas):
        raise records.damaged(_at(where, tensor), "an owner that is no replica", f"0 to {form.replicas - 1}")
    if len(owners) > form.pieces:
        found = f"{len(owners)} pieces of the shape {list(tensor.shape)}"
        raise records.damaged(_at(where, tensor), found, "at most its rows")
    if len(owners) > form.replicas:  # so that all pieces of all shards are no more than the ranks of the mesh
        raise records.damaged(
            _at(where, tensor), f"{len(owners)} pieces of each shard", f"at most its {form.replicas} replicas"
        )
