"""A step in memory: what the engine does between the two halves of the state room, without its files."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch

from ckpt.format.layout import Mesh
from ckpt.format.values import decode, encode
from ckpt.plan.boxes import Box, local_box, whole_box
from ckpt.state import FlatState, LoadTarget, StoredState, StoredTensor, flatten, read_tree, wanted


class Shard(NamedTuple):
    """One rank's part of one tensor."""

    name: str
    stored: StoredTensor
    box: Box
    values: torch.Tensor


class RankPart(NamedTuple):
    """All that one rank saves; can be sent to another process."""

    shards: list[Shard]
    own: list[Shard]
    aliases: dict[str, str]
    values: bytes
    rank_values: bytes


def part_of(state: Any, rank: int = 0, world: int = 1) -> RankPart:
    """What ``rank`` saves of ``state``, copied and encoded."""
    flat = flatten(state, rank=rank, world=world)
    return part_of_flat(flat, rank)


def part_of_flat(flat: FlatState, rank: int = 0) -> RankPart:
    def shard(leaf: Any) -> Shard:
        box = whole_box(leaf.what.shape)
        if leaf.what.mesh_shape is not None:
            box = local_box(
                Mesh(leaf.what.mesh_shape, leaf.what.mesh_ranks), leaf.what.placements, leaf.what.shape, rank
            )
        assert tuple(leaf.tensor.shape) == box.sizes, leaf
        assert not leaf.tensor.requires_grad, leaf
        return Shard(
            leaf.name, StoredTensor(leaf.what.dtype, leaf.what.shape, leaf.what.kind), box, leaf.tensor.clone()
        )

    def encoded(trees: dict[str, Any]) -> bytes:
        return msgspec.json.encode({key: encode(tree, f"state[{key!r}]") for key, tree in trees.items()})

    return RankPart(
        [shard(leaf) for leaf in flat.tensors],
        [shard(leaf) for leaf in flat.rank_tensors],
        dict(flat.aliases),
        encoded(flat.values),
        encoded(flat.rank_values),
    )


class Step:
    """A saved step: the parts of all ranks put together."""

    def __init__(self, *parts: RankPart) -> None:
        self.parts = parts
        self.whole: dict[tuple[int | None, str], torch.Tensor] = {}
        self.stored: dict[str, StoredTensor] = {}
        self.nbytes = 0
        for part in reversed(parts):  # so that rank 0's copy of a replica stays
            for shard in part.shards:
                self.stored[shard.name] = shard.stored
                whole = self.whole.setdefault(
                    (None, shard.name), torch.empty(shard.stored.shape, dtype=shard.values.dtype)
                )
                whole[_slices(shard.box)] = shard.values
        for rank, part in enumerate(parts):
            for shard in part.own:
                self.whole[rank, shard.name] = shard.values
        self.nbytes = sum(t.numel() * t.element_size() for (rank, _), t in self.whole.items() if rank is None)
        self.aliases = {name: first for part in parts for name, first in part.aliases.items()}

    def view(self, rank: int = 0, world: int = 1) -> StoredState:
        """What a load on ``rank`` of ``world`` sees."""
        same = world == len(self.parts)
        rank_values = [_decoded(part.rank_values) for part in self.parts]
        rank_tensors = [{shard.name: shard.stored for shard in part.own} for part in self.parts]
        return StoredState(
            tensors=self.stored,
            aliases=self.aliases,
            values=_decoded(self.parts[0].values),
            rank_values=rank_values[rank] if same else None,
            rank_tensors=rank_tensors[rank] if same else {},
            all_rank_values=None if same else rank_values,
            all_rank_tensors=None if same else rank_tensors,
        )

    def carry_out(self, reads: list[Any]) -> None:
        """Do what the engine does with reads."""
        for read in reads:
            source = self.whole[read.rank, read.name]
            assert read.box.numel
            assert tuple(read.dest.shape) == read.box.sizes
            assert str(source.dtype) == f"torch.{read.dtype}"
            read.dest.copy_(source[_slices(read.box)])

    def load(self, state: Any, rank: int = 0, world: int = 1, **options: Any) -> LoadTarget:
        """Load into ``state``."""
        target = wanted(state, self.view(rank, world), rank=rank, world=world, **options)
        self.carry_out(target.reads)
        target.apply()
        return target

    def read(self) -> dict[str, Any]:
        """The whole state without a template."""
        tree, reads = read_tree(self.view(world=-1))
        self.carry_out(reads)
        return tree


def save(state: Any) -> Step:
    """A step of a single rank."""
    return Step(part_of(state))


def _decoded(raw: bytes) -> dict[str, Any]:
    return {key: decode(node, key) for key, node in msgspec.json.decode(raw).items()}


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal in value, type, dtype and bits, all the way down."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert a.shape == b.shape, where
        if hasattr(a, "_local_tensor"):
            assert a.placements == b.placements, where
            a, b = a._local_tensor, b._local_tensor
        x, y = a.detach().contiguous().clone(), b.detach().contiguous().clone()
        assert x.reshape(-1).view(torch.uint8).tolist() == y.reshape(-1).view(torch.uint8).tolist(), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif type(a).__module__ == "numpy" and getattr(a, "ndim", 0):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), where
    elif isinstance(a, float):
        assert a.hex() == b.hex() or a != a, where  # noqa: PLR0124 - NaN
    else:
        assert a == b, where


def assert_same_optimizer(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Two optimizers of modules declared alike have equal state and settings."""
    x, y = a.state_dict(), b.state_dict()
    assert x["state"].keys() == y["state"].keys()
    for key in x["state"]:
        assert x["state"][key].keys() == y["state"][key].keys(), key
        for name in x["state"][key]:
            assert_same(x["state"][key][name], y["state"][key][name], f"{key}.{name}")
    for p, q in zip(x["param_groups"], y["param_groups"], strict=True):
        assert p.keys() == q.keys()
        for name in p:
            assert_same(p[name], q[name], name)
