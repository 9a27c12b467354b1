"""From a flattened state to what this rank writes: structures exchanged, values compared, layouts planned, cached."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from ckpt.engine.ranks import Ranks
from ckpt.errors import BadInputError, DamagedError
from ckpt.format import records, values
from ckpt.format.commit import LayoutRef, check_step
from ckpt.format.layout import Layout, Mesh, encode_layout
from ckpt.format.part import RankTensor, data_name
from ckpt.format.safetensors import HeaderEntry, build_header, st_dtype
from ckpt.keeper.protocol import FileTask, LayoutTask
from ckpt.plan.boxes import Box, LayoutBoxes, local_box, whole_box
from ckpt.plan.files import Entry, file_tables
from ckpt.plan.save import Group, LocalTensor, Structure, hf_index, plan_layouts
from ckpt.snapshot.arena import place_files
from ckpt.snapshot.copy import tensor_bytes
from ckpt.state import FlatState, Inspector, TensorLeaf, flatten

GROUP_PREFIX = "group:"  # of the digests that are compared within a layout only


class EncodedValues(msgspec.Struct, frozen=True):
    """A state's values as typed JSON, and the digest of each top-level entry.

    Entries that hold a module or an optimizer rightly differ between pipeline stages: the key of
    their digest starts with ``group:`` and is compared within a layout only.
    """

    shared: dict[str, Any]
    digests: dict[str, str]
    own: dict[str, Any]


def encode_values(flat: FlatState) -> EncodedValues:
    """Every value of a state; raises UnsupportedValueError by name for one without a typed form."""
    for key in flat.values:
        if key.startswith(GROUP_PREFIX):
            raise BadInputError(f"state[{key!r}]: top-level keys do not start with {GROUP_PREFIX!r}; rename it")
    shared = {key: values.encode(tree, f"state[{key!r}]") for key, tree in flat.values.items()}
    digests = {
        (f"{GROUP_PREFIX}{key}" if values.holds_nodes(flat.values[key]) else key): values.values_digest(node)
        for key, node in shared.items()
    }
    own = {key: values.encode(tree, f"state[{key!r}]") for key, tree in flat.rank_values.items()}
    return EncodedValues(shared, digests, own)


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A state, flattened and encoded: all of it that is decided before ranks talk."""

    flat: FlatState
    values: EncodedValues
    structure: Structure

    def values_digest(self) -> str:
        """One digest of all plain values, which must be the same on all ranks."""
        plain = {key: digest for key, digest in self.values.digests.items() if not key.startswith(GROUP_PREFIX)}
        return records.digest(msgspec.json.encode(plain, order="deterministic"))


def prepare(state: Mapping[str, Any], inspector: Inspector, world: int) -> Prepared:
    """Flatten and encode; raises UnsupportedValueError or BadInputError by name."""
    flat = flatten(state, rank=inspector.rank, world=world, inspector=inspector)
    structure = Structure(tuple([leaf.what for leaf in flat.tensors]), flat.aliases)
    return Prepared(flat, encode_values(flat), structure)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection meanwhile: a save makes thousands of objects and no garbage, but would set one off.

    One over all of torch's objects takes a tenth of a second, which training would wait for.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unchanged(structure: Structure, before: Structure) -> bool:
    """Whether a walk with the same inspector has found what it found before: by identity, hence at once."""
    return (
        len(structure.tensors) == len(before.tensors)
        and all(map(operator.is_, structure.tensors, before.tensors))
        and structure.aliases == before.aliases
    )


class SavePlan(msgspec.Struct, frozen=True):
    """What one rank needs to save states of one structure. Kept until the structure changes."""

    layouts: tuple[Layout, ...]
    mine: int  # index of this rank's layout
    first_of_layout: bool  # this rank writes the shared values of its layout
    encoded: tuple[LayoutTask, ...]
    boxes: LayoutBoxes
    hf_index: bytes | None  # on rank 0 only


def compare_values(ranks: Ranks, digests: dict[str, str]) -> None:
    """Refuse, by name and on every rank, a plain value that differs between ranks. Collective when it does."""
    plain = {key: digest for key, digest in digests.items() if not key.startswith(GROUP_PREFIX)}
    everyone = ranks.gather(plain)
    for rank, other in enumerate(everyone):
        differing = sorted(key for key in {*plain, *other} if everyone[0].get(key) != other.get(key))
        if differing:
            names = ", ".join(f"state[{key!r}]" for key in differing)
            raise BadInputError(
                f"{names}: rank 0 and rank {rank} have different values; make them equal, "
                "or declare them with ckpt.per_rank(...) so that each rank's own is kept"
            )


def make_plan(ranks: Ranks, prepared: Prepared, digests: Sequence[str]) -> SavePlan:
    """Plan for these structure digests (one per rank). Collective."""
    first_with = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    if len(first_with) == 1:
        groups = [Group(prepared.structure, tuple(range(ranks.world)))]
    else:
        is_first = first_with[digests[ranks.rank]] == ranks.rank
        structures = ranks.gather(prepared.structure if is_first else None)
        members: dict[str, list[int]] = {}
        for rank, digest in enumerate(digests):
            members.setdefault(digest, []).append(rank)
        groups = [Group(structures[members[d][0]], tuple(members[d])) for d in members]
    layouts = plan_layouts(groups)
    _refuse_unequal_replicas(ranks, prepared.flat)
    mine = next(i for i, group in enumerate(groups) if ranks.rank in group.ranks)
    encoded = []
    for layout, group in zip(layouts, groups, strict=True):
        digest, raw = encode_layout(layout)
        encoded.append(LayoutTask(digest=digest, raw=raw, ranks=_ranges(group.ranks)))
    _refuse_holes(ranks.world, encoded, layouts)
    return SavePlan(
        layouts=tuple(layouts),
        mine=mine,
        first_of_layout=groups[mine].ranks[0] == ranks.rank,
        encoded=tuple(encoded),
        boxes=LayoutBoxes(layouts[mine]),
        hf_index=hf_index(layouts, ranks.world) if ranks.rank == 0 else None,
    )


def _refuse_holes(world: int, encoded: Sequence[LayoutTask], layouts: Sequence[Layout]) -> None:
    refs = [LayoutRef(task.digest, len(task.raw), task.ranks) for task in encoded]
    by_digest = {task.digest: layout for task, layout in zip(encoded, layouts, strict=True)}
    try:
        check_step(refs, world, by_digest, "this state")
    except DamagedError as error:
        raise BadInputError(f"the ranks' shards do not make up whole tensors: {error}") from None


def _ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return tuple(ranges)


def _refuse_unequal_replicas(ranks: Ranks, flat: FlatState) -> None:
    """Plain tensors of one name are written once, so their bytes must be equal on all ranks.

    Looked at when a plan is made, not at every save: it reads every such tensor. What DDP keeps
    equal itself is trusted.
    """
    if ranks.world == 1:
        return
    plain = [leaf for leaf in flat.tensors if leaf.what.mesh_shape is None]
    untrusted = [leaf for leaf in plain if not (leaf.trusted_replica or leaf.what.first_rank_owns)]
    mine = {leaf.name: _bytes_digest(leaf) for leaf in untrusted}
    together = records.digest(msgspec.json.encode(mine, order="deterministic"))
    if len(set(ranks.gather(together))) == 1:
        return
    everyone = ranks.gather(mine)
    differing: dict[str, tuple[int, int]] = {}
    first: dict[str, tuple[str, int]] = {}
    for rank, digests in enumerate(everyone):
        for name, digest in digests.items():
            known, known_rank = first.setdefault(name, (digest, rank))
            if known != digest:
                differing.setdefault(name, (known_rank, rank))
    if differing:
        names = ", ".join(f"{name} (ranks {a} and {b})" for name, (a, b) in sorted(differing.items())[:10])
        raise BadInputError(
            f"{len(differing)} plain tensor{'s differ' if len(differing) > 1 else ' differs'} between ranks: {names}; "
            "a plain tensor is saved once for all ranks: make it equal, shard it with DTensor, "
            "or declare it with ckpt.per_rank(...)"
        )


def _bytes_digest(leaf: TensorLeaf) -> str:
    return records.digest(tensor_bytes(leaf.tensor))


class ArenaFile(msgspec.Struct, frozen=True):
    """One data file as it lies in an arena: its task for the keeper, its header and its shards."""

    task: FileTask
    header: bytes
    entries: tuple[Entry, ...]


def arena_files(
    plan: SavePlan, rank: int, world: int, rank_tensors: Sequence[RankTensor], encode: str
) -> tuple[list[ArenaFile], int]:
    """Where each of this rank's files lies in the arena, and how many bytes the arena needs."""
    tables = file_tables(plan.layouts[plan.mine], rank, rank_tensors, plan.boxes)
    headers = {group: b"" if encode != "raw" else _header(entries) for group, entries in tables.items()}
    sizes = [len(headers[group]) + entries[-1].offset + entries[-1].nbytes for group, entries in tables.items()]
    offsets, arena_nbytes = place_files(sizes)
    files = []
    for (group, entries), nbytes, offset in zip(tables.items(), sizes, offsets, strict=True):
        task = FileTask(
            group=group,
            name=data_name(group, rank, world, encode),
            arena_offset=offset,
            nbytes=nbytes,
            header_nbytes=len(headers[group]),
            shards=tuple(entry.nbytes for entry in entries),
        )
        files.append(ArenaFile(task, headers[group], tuple(entries)))
    return files, arena_nbytes


def _header(entries: Sequence[Entry]) -> bytes:
    rows = []
    for entry in entries:
        dtype, shape = st_dtype(entry.dtype, entry.box.sizes)
        rows.append(HeaderEntry(key=entry.key, dtype=dtype, shape=shape, nbytes=entry.nbytes))
    return build_header(rows, {"format": "pt"})


Cuts = tuple[tuple[int, int, int], ...]  # (dimension, start, size)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What to copy of one local tensor: ``cuts`` are (dimension, start, size) of the part that this rank writes."""

    name: str
    arena_offset: int
    nbytes: int
    cuts: Cuts

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the local tensor."""
        for dimension, start, size in self.cuts:
            tensor = tensor.narrow(dimension, start, size)
        return tensor


def arena_pieces(files: Sequence[ArenaFile], structure: Structure, rank: int) -> list[Piece]:
    """All that goes into this rank's arena, in the order of the arena."""
    whats = {what.name: what for what in structure.tensors}
    known: dict[Any, Cuts] = {}  # thousands of tensors are cut in a few ways, and the ranks of a mesh can be many
    pieces = []
    for file in files:
        start = file.task.arena_offset + len(file.header)
        for entry in file.entries:
            cuts: Cuts = ()
            what = whats.get(entry.name)
            if what is not None:
                key = (id(what.mesh_ranks), what.mesh_shape, what.placements, what.shape, entry.box)
                found = known.get(key)
                cuts = known[key] = _cuts(entry.box, _held_box(what, rank)) if found is None else found
            pieces.append(Piece(entry.name, start + entry.offset, entry.nbytes, cuts))
    return pieces


def _cuts(box: Box, held: Box) -> Cuts:
    return tuple(
        (dimension, start - held_start, size)
        for dimension, (start, size, held_start, held_size) in enumerate(
            zip(box.offsets, box.sizes, held.offsets, held.sizes, strict=True)
        )
        if size != held_size
    )


def _held_box(what: LocalTensor, rank: int) -> Box:
    if what.mesh_shape is None or what.mesh_ranks is None:
        return whole_box(what.shape)
    return local_box(Mesh(what.mesh_shape, what.mesh_ranks), what.placements, what.shape, rank)
