"""A step without a template: the whole state as nested containers, whole CPU tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt.errors import BadInputError, DamagedError
from ckpt.format.names import unescape
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef
from ckpt.plan.boxes import whole_box
from ckpt.state.kinds import DICTS, LISTS, rebuilt, stored_names
from ckpt.state.optimizer import NO_PARAMETER, PARAMETERS, tensor_states
from ckpt.state.records import Read, StoredState, StoredTensor
from ckpt.state.tensors import dtype_of


def read_tree(stored: StoredState) -> tuple[dict[str, Any], list[Read]]:
    """The whole state, and the reads that fill the tensors in it.

    A module is a flat dict like its ``state_dict()``, an optimizer ``{"state": {parameter name:
    {key: value}}, "param_groups": [...]}`` with ``"params"`` as names, a value of each rank the list of
    all ranks' values. Tied tensors are one tensor.
    """
    reader = _Reader(stored)
    return {key: reader.build(node) for key, node in stored.values.items()}, reader.reads


class _Reader:
    def __init__(self, stored: StoredState) -> None:
        self.reads: list[Read] = []
        self._stored = stored
        self._tensors: Mapping[str, Any] = stored.tensors
        self._rank: int | None = None
        self._made: dict[tuple[int | None, str], Any] = {}

    def build(self, node: Any) -> Any:
        if isinstance(node, TensorRef):
            return self._tensor(node.name)
        if isinstance(node, ModuleNode):
            return self._module(node)
        if isinstance(node, OptimizerNode):
            return self._optimizer(node)
        if isinstance(node, RankRef):
            return self._all_ranks(node)
        if type(node) in DICTS:
            return rebuilt(node, [(key, self.build(item)) for key, item in node.items()])
        if type(node) in LISTS:
            return rebuilt(node, [self.build(item) for item in node])
        return node

    def _tensor(self, name: str) -> Any:
        made = self._made.get((self._rank, name))
        if made is None:
            found = self._tensors.get(name)
            if found is None:
                raise DamagedError(f"a value stands for the tensor {name[:200]!r}, which the step does not have")
            stored = StoredTensor(*found)
            try:
                made = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
            except RuntimeError as error:
                shape = list(stored.shape)
                raise BadInputError(f"tensor {name[:200]!r}: no memory for {stored.dtype} {shape}: {error}") from None
            box = whole_box(stored.shape)
            if box.numel:
                self.reads.append(Read(name, box, made, stored.dtype, self._rank))
            if stored.kind == "ndarray":
                made = made.numpy()
            self._made[self._rank, name] = made
        return made

    def _module(self, node: ModuleNode) -> dict[str, Any]:
        start, inner = f"{node.prefix}.", set(stored_names(node.extra))
        aliases = self._stored.aliases if self._rank is None else {}
        found: dict[str, Any] = {}
        for name in self._tensors:
            if name.startswith(start) and name not in inner:
                found[_key(name[len(start) :])] = self._tensor(name)
        for name, first in aliases.items():
            if name.startswith(start):
                found[_key(name[len(start) :])] = self._tensor(first)
        found.update((_key(fqn), self.build(tree)) for fqn, tree in node.extra.items())
        return found

    def _optimizer(self, node: OptimizerNode) -> dict[str, Any]:
        state: dict[Any, dict[Any, Any]] = {}
        for parameter, names in tensor_states(self._tensors, node.prefix).items():
            state[parameter] = {key: self._tensor(name) for key, name in names.items()}
        for parameter, values in node.state.items():
            if parameter != NO_PARAMETER:
                state.setdefault(parameter, {}).update(self.build(values))
        order = [name for group in node.groups for name in group[PARAMETERS]]
        state = {name: state.pop(name) for name in order if name in state} | state
        state |= self.build(node.state.get(NO_PARAMETER, {}))
        return {"state": state, "param_groups": [self.build(group) for group in node.groups]}

    def _all_ranks(self, node: RankRef) -> list[Any]:
        if self._rank is not None:
            raise DamagedError(f"a value of rank {self._rank}'s own stands for another such value, without end")
        stored = self._stored
        if stored.all_rank_values is None:
            rank_values, rank_tensors = [stored.rank_values or {}], [stored.rank_tensors]
        else:
            rank_values = list(stored.all_rank_values)
            rank_tensors = list(stored.all_rank_tensors or [{}] * len(rank_values))
        before, result = (self._tensors, self._rank), []
        for rank, (values, tensors) in enumerate(zip(rank_values, rank_tensors, strict=True)):
            if node.key in values:
                self._tensors, self._rank = tensors, rank
                result.append(self.build(values[node.key]))
        self._tensors, self._rank = before
        return result


def _key(fqn: str) -> str:
    """A state-dict key again, from its escaped components."""
    return fqn if "%" not in fqn else ".".join(str(unescape(component)) for component in fqn.split("."))
