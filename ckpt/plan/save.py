"""Who writes what: from the structures of all ranks to layouts with owners. Pure, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec

from ckpt.errors import BadInputError
from ckpt.format import records
from ckpt.format.layout import Layout, Mesh, Tensor
from ckpt.format.part import data_name
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.balance import Shard, spread
from ckpt.plan.boxes import LayoutBoxes, replica_count, replicated_dimensions, shard_box, whole_box

Grid = tuple[tuple[int, ...], tuple[int, ...]]  # a mesh's shape and ranks


class LocalTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor as one rank sees it; ``mesh_shape`` is None for a plain tensor (a replica on every rank)."""

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] | None = None
    mesh_ranks: tuple[int, ...] | None = None
    placements: tuple[str, ...] = ()
    kind: str = "tensor"
    first_rank_owns: bool = False


class Structure(msgspec.Struct, frozen=True):
    """All that a layout depends on, but for the owners. Ranks with an equal one share a layout."""

    tensors: tuple[LocalTensor, ...]
    aliases: dict[str, str]

    def digest(self) -> str:
        """The digest that ranks exchange."""
        grids = _Grids()
        rows = [
            (t.name, t.group, t.dtype, t.shape, grids.number_of(t), t.placements, t.kind, t.first_rank_owns)
            for t in self.tensors
        ]
        return records.digest(msgspec.json.encode((list(grids.numbers), rows, self.aliases), order="deterministic"))


class _Grids:
    """Grids, numbered in the order in which they come. One can be long, and thousands of tensors are on it."""

    def __init__(self, everyone: tuple[int, ...] = ()) -> None:
        self.numbers: dict[Grid, int] = {}
        self._plain: Grid = ((len(everyone),), everyone)  # of a tensor without a mesh
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # by the identity of the ranks, to hash them once

    def number_of(self, tensor: LocalTensor) -> int:
        """The number of the tensor's grid."""
        shape, ranks = self._plain
        if tensor.mesh_shape is not None and tensor.mesh_ranks is not None:
            shape, ranks = tensor.mesh_shape, tensor.mesh_ranks
        key = (id(ranks), shape)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self.numbers.setdefault((shape, ranks), len(self.numbers))
        return number


class Group(msgspec.Struct, frozen=True):
    """The ranks (ascending) that have one structure."""

    structure: Structure
    ranks: tuple[int, ...]


def plan_layouts(groups: Sequence[Group]) -> list[Layout]:
    """One layout per group. Every name is owned in the first group that has it, and in a later one only by the
    ranks of the same mesh, which hold the other shards of it.

    Replicas are written once, balanced by bytes over the ranks that hold them. Raises
    BadInputError naming every tensor whose shape or dtype differs between groups.
    """
    _refuse_conflicts(groups)
    owned: dict[str, _Owned] = {}
    same: dict[Grid, Grid] = {}  # one object for equal grids, which compares at once
    return [_layout(group, owned, same) for group in groups]


def _refuse_conflicts(groups: Sequence[Group]) -> None:
    if len(groups) == 1:
        return
    first: dict[str, tuple[LocalTensor, int]] = {}
    conflicts = []
    for group in groups:
        for tensor in group.structure.tensors:
            other, rank = first.setdefault(tensor.name, (tensor, group.ranks[0]))
            if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
                conflicts.append(
                    f"{tensor.name}: {other.dtype}{list(other.shape)} on rank {rank}, "
                    f"{tensor.dtype}{list(tensor.shape)} on rank {group.ranks[0]}"
                )
    if conflicts:
        raise BadInputError(
            "tensors of one name differ between ranks; declare them with ckpt.per_rank or give them "
            "names of their own: " + "; ".join(conflicts)
        )


class _Owned(msgspec.Struct, frozen=True):
    """How an earlier group wrote a name."""

    grid: Grid
    placements: tuple[str, ...]
    owners: tuple[int, ...]


def _layout(group: Group, owned: dict[str, _Owned], same: dict[Grid, Grid]) -> Layout:
    grids = _Grids(group.ranks)
    replica = ("R",)
    tensors = [
        _Placement(local, grids.number_of(local), replica if local.mesh_shape is None else local.placements)
        for local in group.structure.tensors
    ]
    grid_of = [same.setdefault(grid, grid) for grid in grids.numbers]
    meshes = tuple(Mesh(shape, ranks) for shape, ranks in grid_of)
    owners = _owners([t for t in tensors if t.local.name not in owned], meshes, len(group.ranks))
    for local, mesh, placements in tensors:
        grid = grid_of[mesh]
        mine = _Owned(grid, placements, owners.get(local.name, ()))
        first = owned.setdefault(local.name, mine)
        if first is not mine and first.placements == placements and first.grid == grid:
            owners[local.name] = first.owners
    rows = tuple(
        Tensor(t.name, t.group, t.dtype, t.shape, mesh, placements, owners.get(t.name, ()), t.kind)
        for t, mesh, placements in tensors
    )
    return Layout(records.FORMAT, meshes, rows, dict(group.structure.aliases))


class _Placement(NamedTuple):
    """A tensor on the mesh of that number of its layout."""

    local: LocalTensor
    mesh: int
    placements: tuple[str, ...]


def _owners(tensors: Sequence[_Placement], meshes: Sequence[Mesh], ranks: int) -> dict[str, tuple[int, ...]]:
    """Name -> owners. Where replicas are to be spread, so that bytes are balanced over the holders of each shard."""
    result: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[int, tuple[int, ...]], dict[str, Shard]] = {}  # (mesh, replicated dimensions) -> replicas
    shards: dict[tuple[int, tuple[str, ...], tuple[int, ...], str], Shard] = {}  # few, of many tensors
    nbytes = 0
    for local, mesh, placements in tensors:
        nbytes += prod(local.shape) * DTYPE_NBYTES[local.dtype]
        mesh_shape = meshes[mesh].shape
        if local.first_rank_owns or replica_count(mesh_shape, placements) == 1:
            result[local.name] = (0,)
            continue
        key = (mesh, placements, local.shape, local.dtype)
        shard = shards.get(key)
        if shard is None:
            shard = shards[key] = _largest_shard(local, mesh_shape, placements)
        shared.setdefault((mesh, replicated_dimensions(placements)), {})[local.name] = shard
    for (mesh, dimensions), alike in shared.items():
        replicas = prod(meshes[mesh].shape[i] for i in dimensions)
        result.update(spread(alike, replicas, nbytes / ranks))
    return result


def _largest_shard(tensor: LocalTensor, mesh_shape: tuple[int, ...], placements: tuple[str, ...]) -> Shard:
    first = shard_box(mesh_shape, placements, tensor.shape, (0,) * len(mesh_shape))  # late places get less, never more
    rows = max(1, first.sizes[0]) if first.sizes else 1
    return Shard(rows, first.numel // rows * DTYPE_NBYTES[tensor.dtype])


def hf_index(layouts: Sequence[Layout], world: int) -> bytes | None:
    """``model.safetensors.index.json`` when every model tensor is whole in one rank's file, else None.

    The shape is Hugging Face's: ``{"metadata": {"total_size"}, "weight_map": {name: file}}``.
    """
    weight_map: dict[str, str] = {}
    total_nbytes = 0
    for layout in layouts:
        boxes = LayoutBoxes(layout)
        for tensor in layout.tensors:
            if tensor.group != "model" or not tensor.owners or tensor.name.removeprefix("model.") in weight_map:
                continue
            whole = whole_box(tensor.shape)
            if not whole.numel:
                writers = [next(rank for rank in layout.meshes[tensor.mesh].ranks if boxes.owned(tensor, rank))]
            else:
                writers = []
                for rank, piece in boxes.holders(tensor, whole):
                    if piece != whole:
                        return None
                    writers.append(rank)
            weight_map[tensor.name.removeprefix("model.")] = data_name("model", writers[0], world, "raw")
            total_nbytes += whole.numel * DTYPE_NBYTES[tensor.dtype]
    if not weight_map:
        return None
    return msgspec.json.format(
        msgspec.json.encode({"metadata": {"total_size": total_nbytes}, "weight_map": dict(sorted(weight_map.items()))}),
        indent=2,
    )
