"""A state to named shards and values: the first half of a save. Nothing is copied and no collective runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import UnsupportedValueError
from ckpt.format.names import Component, join_name
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef
from ckpt.state.kinds import DICTS, LISTS, check_state, is_object, is_per_rank, rebuilt
from ckpt.state.model import ModuleWalk, escaped_key
from ckpt.state.optimizer import flatten_optimizer
from ckpt.state.records import FlatState, PerRank, TensorLeaf
from ckpt.state.rng import RNG
from ckpt.state.tensors import Inspector, array_tensor, is_ndarray

MAX_DEPTH = 200  # containers in containers, as in ckpt.format.values
_ATOMS = {str, int, float, bool, type(None), bytes}

Path = tuple[Component, ...]


def flatten(state: Mapping[str, Any], *, rank: int, world: int, inspector: Inspector | None = None) -> FlatState:
    """``state`` as named tensors and typed values, by names that no wrapper, rank or world size changes.

    Called by the engine on every save, with the same ``inspector`` each time so that tensors which have
    not changed cost next to nothing. The tensors are live: copy them, and encode the values, before
    the caller's next instruction. Raises BadInputError for a state that is no mapping of text keys and
    UnsupportedValueError, naming it, for a tensor or parameter that has no plain form.
    """
    check_state(state)
    flattener = Flattener(inspector or Inspector(rank), world)
    values = {key: flattener.tree(value, (key,)) for key, value in state.items()}
    flattener.finish()
    return FlatState(
        tensors=flattener.tensors,
        aliases=flattener.aliases,
        rank_tensors=flattener.rank_tensors,
        values=values,
        rank_values=flattener.rank_values,
        optimizers=flattener.optimizers,
        stepped=flattener.stepped,
        trained=flattener.trained,
        generators=flattener.generators,
    )


class Flattener:
    """One walk over a state. ``names`` maps a tensor's id to every name that it has in the state."""

    def __init__(self, inspector: Inspector, world: int) -> None:
        self.tensors: list[TensorLeaf] = []
        self.rank_tensors: list[TensorLeaf] = []
        self.aliases: dict[str, str] = {}
        self.rank_values: dict[str, Any] = {}
        self.names: dict[int, list[str]] = {}
        self.trusted: set[int] = set()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.stepped: set[str] = set()
        self.trained: set[str] = set()
        self.generators: list[str] = []
        self._world = world
        self.inspector = inspector
        self._depth = 0
        self._own_rank = False  # inside a per_rank value
        self._in_object = False  # inside what an object's state_dict() returned
        self._later: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Flatten the optimizers, now that every parameter has its name."""
        for optimizer in self._later:
            optimizer()

    def tree(self, value: Any, path: Path) -> Any:
        """``value`` with references in place of what is stored elsewhere; containers are new."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in DICTS:
            return self._container(value, path)
        if kind in LISTS:
            return self._container(value, path)
        if isinstance(value, torch.Tensor):
            name = join_name(path)
            if not self._in_object:
                self.names.setdefault(id(value), []).append(name)
            self.note(value, name, "state")
            return TensorRef(name)
        if is_ndarray(value):
            name = join_name(path)
            self.note(array_tensor(value, name), name, "state", kind="ndarray")
            return TensorRef(name)
        if isinstance(value, PerRank) or is_per_rank(value):
            return self._per_rank(value, path)
        if isinstance(value, (nn.Module, torch.optim.Optimizer)) or is_object(value):
            return self._object(value, path)
        return value  # plain, or refused by name when the values are encoded

    def note(
        self,
        tensor: torch.Tensor,
        name: str,
        group: str,
        kind: str = "tensor",
        *,
        trusted: bool = False,
        first_rank_owns: bool = False,
    ) -> None:
        """Note one tensor down under ``name``."""
        local, what = self.inspector.part(tensor, name, group, kind, first_rank_owns=first_rank_owns)
        if local.is_meta:
            raise UnsupportedValueError(f"{name}: on the meta device, so it has no values; materialize it first")
        if local.is_conj() or local.is_neg():
            local = local.resolve_conj().resolve_neg()
        if what.mesh_shape is not None:
            if self._own_rank:
                raise UnsupportedValueError(f"{name}: a DTensor cannot be per_rank; all ranks hold it together")
            trusted = True  # its placements say what is a replica
        leaf = TensorLeaf(what, local, trusted)
        (self.rank_tensors if self._own_rank else self.tensors).append(leaf)

    @property
    def own_rank(self) -> bool:
        """Whether the walk is inside a per_rank value."""
        return self._own_rank

    def _container(self, value: Any, path: Path) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            where = join_name(path[:3])
            raise UnsupportedValueError(f"{where}: nested deeper than {MAX_DEPTH} levels, or contains itself")
        if isinstance(value, dict):
            result = rebuilt(value, [(key, self.tree(item, (*path, key))) for key, item in value.items()])
        else:
            result = rebuilt(value, [self.tree(item, (*path, str(index))) for index, item in enumerate(value)])
        self._depth -= 1
        return result

    def _per_rank(self, value: Any, path: Path) -> RankRef:
        name = join_name(path)
        if self._own_rank:
            raise UnsupportedValueError(f"{name}: per_rank inside per_rank; declare the outer one only")
        self._own_rank = True
        inner = value.value if isinstance(value, PerRank) else value
        if isinstance(inner, RNG):
            self.generators.append(name)
        # A random generator is per rank by itself, so it must not be taken for a second declaration.
        self.rank_values[name] = self._object(inner, path) if is_per_rank(inner) else self.tree(inner, path)
        self._own_rank = False
        return RankRef(name)

    def _object(self, value: Any, path: Path) -> Any:
        name = join_name(path)
        if self._in_object:
            raise UnsupportedValueError(
                f"{name}: a {type(value).__module__}.{type(value).__qualname__} inside what another object's "
                "state_dict() returns; return its state_dict() there instead"
            )
        if isinstance(value, nn.Module):
            return self._module(value, name, path)
        if isinstance(value, torch.optim.Optimizer):
            node = OptimizerNode(name, [], {})
            group = "optimizer" if path == ("optimizer",) else "state"
            own_rank = self._own_rank

            def later() -> None:
                self._own_rank = own_rank
                flatten_optimizer(value, node, group, path, self)
                self._own_rank = False

            self._later.append(later)
            self.optimizers.append(value)
            return node
        self._in_object = True
        tree = self.tree(value.state_dict(), path)
        self._in_object = False
        return tree

    def _module(self, module: nn.Module, prefix: str, path: Path) -> ModuleNode:
        walk = ModuleWalk(module, prefix, self._world)
        group = "model" if path == ("model",) else "state"
        node = ModuleNode(prefix, {})
        for key, value in walk.values.items():
            fqn = escaped_key(key)
            name = f"{prefix}.{fqn}"
            if not isinstance(value, torch.Tensor):
                self._in_object = True
                node.extra[fqn] = self.tree(value, (*path, *key.split(".")))
                self._in_object = False
                continue
            if walk.is_live(value):
                self.names.setdefault(id(value), []).append(name)
                first = walk.first_keys.get(key)
                if first is not None and not self._own_rank:
                    self.aliases[name] = f"{prefix}.{escaped_key(first)}"
                    continue
            trusted = walk.is_trusted(value)
            if trusted:
                self.trusted.add(id(value))
            self.note(value, name, group, trusted=trusted, first_rank_owns=walk.first_rank_owns(value))
        return node
