"""What passes between the state room and the engine: leaves of a save, the stored state, and reads of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from ckpt.plan.boxes import Box
from ckpt.plan.save import LocalTensor

# What a class that keeps a value per rank says of itself: ``ckpt_per_rank = True``.
PER_RANK_ATTRIBUTE = "ckpt_per_rank"


class TensorLeaf(msgspec.Struct, frozen=True, eq=False):
    """One tensor of a state as this rank holds it.

    ``tensor`` is live: this rank's local shard, strided as it may be, detached. ``what`` is true of the global
    tensor, on all ranks. ``trusted_replica``: equal on all holders by construction, so nobody need compare bytes.
    """

    what: LocalTensor
    tensor: torch.Tensor
    trusted_replica: bool = False

    @property
    def name(self) -> str:
        """Its name in the state."""
        return self.what.name

    @property
    def group(self) -> str:
        """Which file of a rank it goes into: ``model``, ``optimizer`` or ``state``."""
        return self.what.group


class FlatState(msgspec.Struct, frozen=True, eq=False):
    """A state, flattened. Encode ``values`` and ``rank_values`` and copy the tensors before the caller goes on.

    ``values`` (top-level key -> tree) hold TensorRef, RankRef, ModuleNode and OptimizerNode where
    something is stored elsewhere; ``rank_values`` and ``rank_tensors`` are this rank's own. ``optimizers`` are
    those in the state, ``stepped`` the names in ``tensors`` that only their steps change, and ``trained`` those of
    parameters that these steps should change. ``generators`` are the keys of random states in ``rank_values``.
    """

    tensors: list[TensorLeaf]
    aliases: dict[str, str]  # other name -> the name in ``tensors``
    rank_tensors: list[TensorLeaf]
    values: dict[str, Any]
    rank_values: dict[str, Any]
    optimizers: list[torch.optim.Optimizer]
    stepped: set[str]
    trained: set[str] = set()
    generators: list[str] = []


class StoredTensor(NamedTuple):
    """What a step says of a tensor: its true dtype, global shape and kind."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"


class StoredState(msgspec.Struct, frozen=True):
    """A step as a load sees it: all layouts merged, values decoded.

    At the world size of the save a load wants its own ``rank_values`` and ``rank_tensors``. At another one
    ``rank_values`` is None, and it wants those of all saved ranks, in rank order; so does a read.
    """

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]
    rank_values: Mapping[str, Any] | None = None
    rank_tensors: Mapping[str, StoredTensor] = {}
    all_rank_values: Sequence[Mapping[str, Any]] | None = None
    all_rank_tensors: Sequence[Mapping[str, StoredTensor]] | None = None


class Read(msgspec.Struct, frozen=True, eq=False):
    """Bytes that a load wants: ``box`` (global) of stored tensor ``name`` into ``dest``.

    ``dest`` has exactly the box's shape but may be strided, on any device (never conjugated or negated by
    a mere flag), and, with ``cast``, of another dtype than the stored ``dtype``. ``rank`` is None for a
    tensor of the layouts, else the saved rank whose own tensor it is. Boxes without elements are never
    asked for.
    """

    name: str
    box: Box
    dest: torch.Tensor
    dtype: str
    rank: int | None = None


class Mismatch(msgspec.Struct, frozen=True):
    """A name that is on both sides but does not fit."""

    name: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.name}: {self.stored} in the step, {self.wanted} in the state"


class PerRank:
    """A value that each rank has for itself; see ``per_rank``. ``.value`` is what a load fills or replaces."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"ckpt.per_rank({self.value!r})"


def per_rank(value: Any) -> PerRank:
    """Declare that ``value`` differs from rank to rank, as ``{"seen": ckpt.per_rank(seen)}``.

    A load at the same world size gives each rank its own again: an object, module or tensor is
    filled in place, anything else is put into the declaration's ``.value``. At another world size the
    values of all ranks go, as a list in rank order, to the object's ``load_state_dicts``; a value
    without that method is refused by name.
    """
    return value if isinstance(value, PerRank) else PerRank(value)


def describe(dtype: str, shape: Sequence[int], kind: str = "tensor") -> str:
    """``float32 (4, 3)``, the way shapes and dtypes stand in messages."""
    text = f"{dtype} {tuple(shape)}"
    return text if kind == "tensor" else f"{kind} {text}"
