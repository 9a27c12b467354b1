"""A training job of very many ranks, as one of them sees it: its state without a byte, and who writes how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from ckpt.engine.ranks import Ranks
from ckpt.format.layout import Layout, Mesh
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, local_box, whole_box
from ckpt.plan.save import LocalTensor, Structure

WIDTH, HIDDEN, VOCABULARY = 16_384, 65_536, 131_072
SHARDS = 256  # of HSDP, at most


def parameters(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes: 12 a block, and 3."""
    yield "tok_embeddings.weight", (VOCABULARY, WIDTH)
    for i in range(layers):
        block = f"layers.{i}"
        for name in ("wq", "wk", "wv", "wo"):
            yield f"{block}.attention.{name}.weight", (WIDTH, WIDTH)
        for name in ("wq", "wk", "wv"):
            yield f"{block}.attention.{name}.bias", (WIDTH,)
        yield f"{block}.feed_forward.w1.weight", (HIDDEN, WIDTH)
        yield f"{block}.feed_forward.w2.weight", (WIDTH, HIDDEN)
        yield f"{block}.feed_forward.w3.weight", (HIDDEN, WIDTH)
        yield f"{block}.attention_norm.weight", (WIDTH,)
        yield f"{block}.ffn_norm.weight", (WIDTH,)
    yield "norm.weight", (WIDTH,)
    yield "output.weight", (VOCABULARY, WIDTH)


def structure(scheme: str, world: int, layers: int) -> Structure:
    """What a rank of such a job finds in its state."""
    shards = min(SHARDS, world // 4)
    mesh_shape, placements = {
        "FSDP": ((world,), ("S0",)),
        "HSDP": ((world // shards, shards), ("R", "S0")),
        "DDP": (None, ()),
    }[scheme]
    ranks = None if mesh_shape is None else tuple(range(world))
    names = list(parameters(layers))

    def tensors(group: str, prefix: str) -> Iterator[LocalTensor]:
        for name, shape in names:
            yield LocalTensor(prefix + name, group, "float32", shape, mesh_shape, ranks, placements)

    found = [*tensors("model", "model.")]
    for moment in ("exp_avg", "exp_avg_sq"):
        found += tensors("optimizer", f"optimizer.state.{moment}.model.")
    found += [LocalTensor(f"optimizer.state.step.model.{name}", "optimizer", "float32", ()) for name, _ in names]
    return Structure(tuple(found), {})


class OneOfMany(Ranks):
    """One rank of a job whose other ranks say what it says."""

    def gather(self, value: Any) -> list[Any]:
        """Its own value, from everyone."""
        return [value] * self.world


class Need(NamedTuple):
    """A tensor that a loading rank asks for."""

    name: str
    box: Box
    nbytes: int


def needs(what: Structure, rank: int) -> list[Need]:
    """All that a rank of such a job holds."""
    known: dict[tuple[int, ...], Box] = {}
    found = []
    for tensor in what.tensors:
        if tensor.shape not in known:
            mesh_shape, mesh_ranks = tensor.mesh_shape, tensor.mesh_ranks
            known[tensor.shape] = (
                whole_box(tensor.shape)
                if mesh_shape is None or mesh_ranks is None
                else local_box(Mesh(mesh_shape, mesh_ranks), tensor.placements, tensor.shape, rank)
            )
        box = known[tensor.shape]
        if box.numel:
            found.append(Need(tensor.name, box, box.numel * DTYPE_NBYTES[tensor.dtype]))
    return found


def rank_nbytes(layout: Layout, world: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes of tensors that each rank writes: for all ranks at once, and apart from the planner's own arithmetic."""
    nbytes = np.zeros(world, np.int64)
    alike = Counter((t.mesh, t.placements, t.shape, t.dtype, t.owners) for t in layout.tensors)
    for (number, placements, shape, dtype, owners), count in alike.items():
        mesh = layout.meshes[number]
        coordinates = np.unravel_index(np.arange(prod(mesh.shape)), mesh.shape)
        replica = np.zeros(prod(mesh.shape), np.int64)
        rows = np.full(prod(mesh.shape), shape[0] if shape else 1)
        for side, word, coordinate in zip(mesh.shape, placements, coordinates, strict=True):
            if word == "R":
                replica = replica * side + coordinate
            else:
                longest = -(-rows // side)
                rows = np.clip(rows - coordinate * longest, 0, longest)
        row_nbytes = prod(shape[1:]) * DTYPE_NBYTES[dtype] * count
        for held in np.unique(rows):
            longest = ceil(held / len(owners))
            pieces = np.clip(held - np.arange(len(owners)) * longest, 0, longest)
            written = np.bincount(owners, pieces, minlength=int(replica.max()) + 1).astype(np.int64)
            at = np.flatnonzero(rows == held)
            nbytes[np.asarray(mesh.ranks)[at]] += written[replica[at]] * row_nbytes
    return nbytes
