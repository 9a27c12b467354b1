"""Who writes what: from the structures of all ranks to layouts with owners. Pure, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import prod

import msgspec

from ckpt.errors import BadInputError
from ckpt.format import records
from ckpt.format.layout import Layout, Mesh, Tensor
from ckpt.format.part import data_name
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import LayoutBoxes, replica_count, replicated_dimensions, sharding_order, whole_box

BALANCED = 1.1  # max / mean bytes per rank that needs no tensor to be cut
Grid = tuple[tuple[int, ...], tuple[int, ...]]  # a mesh's shape and ranks
PIECES_PER_RANK = 8  # when tensors are cut, into pieces of about this fraction of a rank's share


class LocalTensor(msgspec.Struct, frozen=True):
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
        return records.digest(records.encode(self))


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
    return [_layout(group, owned) for group in groups]


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


def _layout(group: Group, owned: dict[str, _Owned]) -> Layout:
    meshes: dict[Grid, int] = {}
    grid: Grid
    placements: tuple[str, ...]
    tensors: list[Tensor] = []
    for local in group.structure.tensors:
        if local.mesh_shape is None or local.mesh_ranks is None:
            grid, placements = ((len(group.ranks),), group.ranks), ("R",)
        else:
            grid, placements = (local.mesh_shape, local.mesh_ranks), local.placements
        mesh = meshes.setdefault(grid, len(meshes))
        tensors.append(
            Tensor(local.name, local.group, local.dtype, local.shape, mesh, placements, owners=(), kind=local.kind)
        )
    grids = tuple(Mesh(shape, ranks) for shape, ranks in meshes)
    fixed = {t.name for t in group.structure.tensors if t.first_rank_owns}
    owners = _owners([t for t in tensors if t.name not in owned], grids, fixed)
    for tensor in tensors:
        grid = (grids[tensor.mesh].shape, grids[tensor.mesh].ranks)
        mine = _Owned(grid, tensor.placements, owners.get(tensor.name, ()))
        first = owned.setdefault(tensor.name, mine)
        if first is not mine and (first.grid, first.placements) == (grid, tensor.placements):
            owners[tensor.name] = first.owners
    tensors = [msgspec.structs.replace(t, owners=owners.get(t.name, ())) for t in tensors]
    return Layout(records.FORMAT, grids, tuple(tensors), dict(group.structure.aliases))


def _owners(tensors: list[Tensor], meshes: Sequence[Mesh], fixed: set[str]) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}  # (mesh, replicated dimensions) -> replicas
    for tensor in tensors:
        replicas = replica_count(meshes[tensor.mesh].shape, tensor.placements)
        if replicas == 1 or tensor.name in fixed:
            result[tensor.name] = (0,)
        else:
            shared.setdefault((tensor.mesh, replicated_dimensions(tensor.placements)), []).append(tensor)
    for (mesh, _), alike in shared.items():
        replicas = replica_count(meshes[mesh].shape, alike[0].placements)
        nbytes = {t.name: _shard_nbytes(t, meshes[mesh]) for t in alike}
        whole = {t.name: 1 for t in alike}
        owners, loads = _balance(nbytes, whole, replicas)
        mean = sum(loads) / replicas
        if max(loads) > BALANCED * mean:
            piece_nbytes = max(1, mean / PIECES_PER_RANK)
            pieces = {
                t.name: min(replicas, max(1, round(nbytes[t.name] / piece_nbytes)), t.shape[0] if t.shape else 1)
                for t in alike
                if t.name in nbytes
            }
            owners, _ = _balance(nbytes, pieces, replicas)
        result.update(owners)
    return result


def _shard_nbytes(tensor: Tensor, mesh: Mesh) -> int:
    shards = prod(mesh.shape[i] for i, _ in sharding_order(mesh.shape, tensor.placements))
    return prod(tensor.shape) * DTYPE_NBYTES[tensor.dtype] // shards


def _balance(
    nbytes: dict[str, int], pieces: dict[str, int], replicas: int
) -> tuple[dict[str, tuple[int, ...]], list[float]]:
    """Largest first to the least loaded replica (LPT); ties go to the lowest replica."""
    heap: list[tuple[float, int]] = [(0.0, replica) for replica in range(replicas)]
    order = sorted(nbytes, key=lambda name: -nbytes[name] / max(1, pieces[name]))
    owners: dict[str, tuple[int, ...]] = {}
    for name in order:
        chosen = []
        for _ in range(max(1, pieces[name])):
            load, replica = heapq.heappop(heap)
            heapq.heappush(heap, (load + nbytes[name] / max(1, pieces[name]), replica))
            chosen.append(replica)
        # Ascending, so that neighbouring pieces of one owner stay neighbours in its file.
        owners[name] = tuple(sorted(chosen))
    loads = [0.0] * replicas
    for load, replica in heap:
        loads[replica] = load
    return owners, loads


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
                writers = [rank for rank in layout.meshes[tensor.mesh].ranks if boxes.owned(tensor, rank)]
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
