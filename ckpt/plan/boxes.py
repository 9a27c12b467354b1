"""Where a tensor's bytes lie: boxes of a global tensor, and which rank holds and writes which.

Everything here is arithmetic on a layout's meshes, placements and owners, so no box is ever
stored. The rules are those of torch's DTensor: a dimension of n rows cut k ways gives place i
the rows ``[min(i*c, n), min((i+1)*c, n))`` with ``c = ceil(n / k)``; several shards of one
dimension nest from left to right, except strided ones (``S0/4``, what FSDP makes of a dimension
that tensor parallelism has cut 4 ways already), which go inside those cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import msgspec

from ckpt.errors import BadInputError
from ckpt.format.layout import Layout, Mesh, Tensor, nesting


class Box(msgspec.Struct, frozen=True, order=True, gc=False):
    """A box of a tensor: per dimension where it starts and how long it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside (1 for a scalar)."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common box in the same coordinates, or None when nothing is common."""
        offsets: list[int] = []
        sizes: list[int] = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, outer: Box) -> Box:
        """The same box in coordinates that start at ``outer``'s corner."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def chunk_bounds(length: int, pieces: int, index: int) -> tuple[int, int]:
    """``[start, stop)`` of piece ``index`` when ``length`` rows are cut by torch.chunk's rule."""
    size = -(-length // pieces)
    return min(index * size, length), min((index + 1) * size, length)


@lru_cache(maxsize=4096)
def sharding_order(mesh_shape: tuple[int, ...], placements: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """``(mesh dimension, tensor dimension)`` of every shard, in the order in which they nest, outermost first.

    Raises BadInputError for placements that are none, or strided ones that fit no place.
    """
    order = nesting(mesh_shape, placements)
    if order is None:
        raise BadInputError(f"placements {list(placements)} make no nesting of shards on a mesh of {list(mesh_shape)}")
    return order


@lru_cache(maxsize=4096)
def replicated_dimensions(placements: tuple[str, ...]) -> tuple[int, ...]:
    """The mesh dimensions along which the tensor is replicated."""
    return tuple(i for i, word in enumerate(placements) if word == "R")


def replica_count(mesh_shape: Sequence[int], placements: tuple[str, ...]) -> int:
    """How many ranks hold each shard."""
    return prod(mesh_shape[i] for i in replicated_dimensions(placements))


def replica_index(mesh_shape: Sequence[int], placements: tuple[str, ...], coordinate: Sequence[int]) -> int:
    """Which replica the rank at ``coordinate`` is: row-major over the replicated mesh dimensions."""
    index = 0
    for dimension in replicated_dimensions(placements):
        index = index * mesh_shape[dimension] + coordinate[dimension]
    return index


def shard_box(
    mesh_shape: Sequence[int], placements: tuple[str, ...], shape: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """The box that the rank at ``coordinate`` of a mesh holds of a tensor of global ``shape``."""
    offsets, sizes = [0] * len(shape), list(shape)
    for mesh_dimension, dimension in sharding_order(tuple(mesh_shape), placements):
        start, stop = chunk_bounds(sizes[dimension], mesh_shape[mesh_dimension], coordinate[mesh_dimension])
        offsets[dimension] += start
        sizes[dimension] = stop - start
    return Box(tuple(offsets), tuple(sizes))


def local_box(mesh: Mesh, placements: tuple[str, ...], shape: Sequence[int], rank: int) -> Box:
    """The box that global ``rank`` holds; BadInputError when the rank is not in the mesh."""
    try:
        position = mesh.ranks.index(rank)
    except ValueError:
        raise BadInputError(f"rank {rank} is not in the mesh of ranks {list(mesh.ranks)}") from None
    return shard_box(mesh.shape, placements, shape, unravel(position, mesh.shape))


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The row-major coordinate of ``position`` in a grid of ``shape``."""
    coordinate: list[int] = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        coordinate.append(place)
    return tuple(reversed(coordinate))


def piece_box(shard: Box, pieces: int, index: int) -> Box:
    """Piece ``index`` of a shard cut ``pieces`` ways along its dimension 0 (a scalar is never cut)."""
    if pieces == 1 or not shard.sizes:
        return shard
    start, stop = chunk_bounds(shard.sizes[0], pieces, index)
    return Box((shard.offsets[0] + start, *shard.offsets[1:]), (stop - start, *shard.sizes[1:]))


class LayoutBoxes:
    """A layout with the position of every rank in every mesh looked up once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._positions = [{rank: i for i, rank in enumerate(mesh.ranks)} for mesh in layout.meshes]

    def coordinate(self, tensor: Tensor, rank: int) -> tuple[int, ...] | None:
        """Where ``rank`` is in the tensor's mesh, or None."""
        position = self._positions[tensor.mesh].get(rank)
        return None if position is None else unravel(position, self.layout.meshes[tensor.mesh].shape)

    def replica(self, tensor: Tensor, rank: int) -> int | None:
        """Which replica of its shard ``rank`` holds; None when it is not in the tensor's mesh."""
        coordinate = self.coordinate(tensor, rank)
        if coordinate is None:
            return None
        return replica_index(self.layout.meshes[tensor.mesh].shape, tensor.placements, coordinate)

    def owned(self, tensor: Tensor, rank: int) -> list[Box]:
        """The boxes of ``tensor`` that ``rank`` writes; empty ones left out.

        A tensor without elements is written (as nothing) by its first owner on the first shard.
        """
        coordinate = self.coordinate(tensor, rank) if tensor.owners else None
        if coordinate is None:
            return []
        mesh_shape = self.layout.meshes[tensor.mesh].shape
        replica = replica_index(mesh_shape, tensor.placements, coordinate)
        if replica not in tensor.owners:
            return []
        shard = shard_box(mesh_shape, tensor.placements, tensor.shape, coordinate)
        if prod(tensor.shape) == 0:
            first = all(coordinate[i] == 0 for i, _ in sharding_order(mesh_shape, tensor.placements))
            return [whole_box(tensor.shape)] if first and replica == tensor.owners[0] else []
        pieces = [piece_box(shard, len(tensor.owners), i) for i, owner in enumerate(tensor.owners) if owner == replica]
        return [piece for piece in pieces if piece.numel]

    def holders(self, tensor: Tensor, box: Box) -> Iterator[tuple[int, Box]]:
        """Every ``(rank, piece)`` written of ``tensor`` that has elements of ``box``; the pieces are not cut to it."""
        if not tensor.owners or not box.numel:
            return
        mesh = self.layout.meshes[tensor.mesh]
        order = sharding_order(mesh.shape, tensor.placements)
        replicated = replicated_dimensions(tensor.placements)
        strides = [prod(mesh.shape[i + 1 :]) for i in range(len(mesh.shape))]
        replica_shape = [mesh.shape[i] for i in replicated]

        def descend(depth: int, shard: Box, position: int) -> Iterator[tuple[int, Box]]:
            if depth == len(order):
                for i, owner in enumerate(tensor.owners):
                    piece = piece_box(shard, len(tensor.owners), i)
                    if piece.intersect(box) is None:
                        continue
                    replica = unravel(owner, replica_shape)
                    rank_at = position + sum(strides[d] * c for d, c in zip(replicated, replica, strict=True))
                    yield mesh.ranks[rank_at], piece
                return
            mesh_dimension, dimension = order[depth]
            places, length = mesh.shape[mesh_dimension], shard.sizes[dimension]
            size = max(1, -(-length // places))
            start = box.offsets[dimension] - shard.offsets[dimension]
            stop = start + box.sizes[dimension]
            for place in range(max(0, start // size), min(places, -(-stop // size))):
                low, high = chunk_bounds(length, places, place)
                offsets, sizes = list(shard.offsets), list(shard.sizes)
                offsets[dimension] += low
                sizes[dimension] = high - low
                inner = Box(tuple(offsets), tuple(sizes))
                if inner.intersect(box) is not None:
                    yield from descend(depth + 1, inner, position + strides[mesh_dimension] * place)

        yield from descend(0, whole_box(tensor.shape), 0)
