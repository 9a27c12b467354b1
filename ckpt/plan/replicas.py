"""Which ranks hold the same bytes of a tensor: arithmetic on layouts, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckpt.format.layout import Layout, Mesh
from ckpt.plan.boxes import unravel

Members = tuple[int, ...]  # ranks, ascending


class ReplicaSets(msgspec.Struct, frozen=True):
    """All sets of ranks that share some replica, and in which of them this rank shares which tensor."""

    sets: tuple[Members, ...]
    mine: Mapping[str, int]  # tensor -> index in ``sets``


def replica_sets(layouts: Sequence[Layout], mine: int, rank: int) -> ReplicaSets:
    """The sets of several ranks each, in one order on all ranks; ``mine`` is the index of the layout of ``rank``.

    What is replicated along every dimension of its mesh in one layout and is in another one too (a plain tensor of two
    pipeline stages) is shared by the ranks of both.
    """
    whole = _whole(layouts)
    cut: dict[tuple[Mesh, tuple[str, ...]], dict[int, Members]] = {}
    found: set[Members] = {members for members in whole.values() if len(members) > 1}
    for layout in layouts:
        for tensor in layout.tensors:
            if tensor.name in whole or "R" not in tensor.placements:
                continue
            key = (layout.meshes[tensor.mesh], tensor.placements)
            if key not in cut:
                cut[key] = _by_rank(*key)
                found.update(cut[key].values())
    sets = tuple(sorted(found))
    number = {members: index for index, members in enumerate(sets)}
    held: dict[str, int] = {}
    own = layouts[mine]
    for tensor in own.tensors:
        members = whole.get(tensor.name) or cut.get((own.meshes[tensor.mesh], tensor.placements), {}).get(rank, ())
        if members in number and rank in members:
            held[tensor.name] = number[members]
    return ReplicaSets(sets, held)


def _whole(layouts: Sequence[Layout]) -> dict[str, Members]:
    """Tensor -> the ranks that hold all of it, for what no rank holds in part."""
    everyone: dict[tuple[int, ...], Members] = {}
    ranks: dict[str, Members] = {}
    sharded: set[str] = set()
    for layout in layouts:
        ascending = [everyone.setdefault(mesh.ranks, _ascending(mesh.ranks)) for mesh in layout.meshes]
        for tensor in layout.tensors:
            if any(word != "R" for word in tensor.placements):
                sharded.add(tensor.name)
                continue
            members = ascending[tensor.mesh]
            known = ranks.setdefault(tensor.name, members)
            if known is not members:
                union = _ascending((*known, *members))
                ranks[tensor.name] = everyone.setdefault(union, union)
    return {name: members for name, members in ranks.items() if name not in sharded}


def _by_rank(mesh: Mesh, placements: tuple[str, ...]) -> dict[int, Members]:
    """Rank -> all ranks with its shard, for every rank of the mesh that shares its own."""
    shards: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(mesh.ranks):
        place = unravel(position, mesh.shape)
        shard = tuple(at for at, word in zip(place, placements, strict=True) if word != "R")
        shards.setdefault(shard, []).append(rank)
    sets = [_ascending(ranks) for ranks in shards.values() if len(ranks) > 1]
    return {rank: members for members in sets for rank in members}


def _ascending(ranks: Iterable[int]) -> Members:
    return tuple(sorted(set(ranks)))
