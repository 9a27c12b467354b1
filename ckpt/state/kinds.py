"""What kinds of values a state may have, and how containers are made anew; for the walks of save and load alike."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import BadInputError
from ckpt.format.values import ModuleNode, OptimizerNode, TensorRef
from ckpt.state.records import PER_RANK_ATTRIBUTE, PerRank
from ckpt.state.tensors import is_ndarray


class Order(enum.IntEnum):
    """When a load sets things, once all bytes have come. Generators last: anything before may draw numbers."""

    TENSORS = 0
    MODULES = 1
    OPTIMIZERS = 2
    OBJECTS = 3
    VALUES = 4
    GENERATORS = 5


DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)  # exactly these types
LISTS = (list, tuple, collections.deque)


def check_state(state: Mapping[str, Any]) -> None:
    """BadInputError unless ``state`` is a mapping whose keys are text."""
    if not isinstance(state, Mapping):
        raise BadInputError(
            f"state: a {type(state).__module__}.{type(state).__qualname__}; expected a mapping such as "
            '{"model": model, "optimizer": optimizer}'
        )
    for key in state:
        if type(key) is not str:
            raise BadInputError(f"state[{key!r}]: its key is a {type(key).__qualname__}; top-level keys are text")


def is_object(value: Any) -> bool:
    """Whether ``value`` keeps its state behind ``state_dict`` and ``load_state_dict``, as modules do too."""
    kind = type(value)
    return (
        not isinstance(value, type)
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )


def is_per_rank(value: Any) -> bool:
    """Whether an object's state is one of each rank without being declared: random generators, stateful loaders."""
    kind = type(value)
    return bool(getattr(kind, PER_RANK_ATTRIBUTE, False)) or any(
        base.__name__ == "StatefulDataLoader" for base in kind.__mro__
    )


def rebuilt(container: Any, items: Iterable[Any]) -> Any:
    """A new container of the type of ``container`` with ``items``: pairs for a dict kind, else elements."""
    kind = type(container)
    if kind is collections.defaultdict:
        return collections.defaultdict(container.default_factory, items)
    if kind is collections.deque:
        return collections.deque(items, container.maxlen)
    if kind is collections.Counter:
        counter: collections.Counter[Any] = collections.Counter()
        dict.update(counter, items)
        return counter
    return kind(items)


def replace_items(container: Any, new: Any) -> None:
    """Make ``container``, of the same type, hold what ``new`` holds."""
    if isinstance(container, list):
        container[:] = new
        return
    if isinstance(container, collections.defaultdict):
        container.default_factory = new.default_factory
    container.clear()
    for key, value in new.items():  # not update(), which a Counter takes for adding up
        container[key] = value


def holds_live(value: Any, *, tensors: bool = True) -> bool:
    """Whether a value of the caller's state is, or contains, something to be filled in place."""
    kind = type(value)
    if kind in DICTS:
        return any(holds_live(item, tensors=tensors) for item in value.values())
    if kind in LISTS:
        return any(holds_live(item, tensors=tensors) for item in value)
    if isinstance(value, torch.Tensor) or is_ndarray(value):
        return tensors
    return isinstance(value, (PerRank, nn.Module, torch.optim.Optimizer)) or is_object(value)


def stored_names(node: Any) -> list[str]:
    """The names of the tensors in a stored tree; a module or optimizer in it counts by its prefix."""
    if isinstance(node, TensorRef):
        return [node.name]
    if isinstance(node, (ModuleNode, OptimizerNode)):
        return [node.prefix]
    if type(node) in DICTS:
        return [name for item in node.values() for name in stored_names(item)]
    if type(node) in LISTS:
        return [name for item in node for name in stored_names(item)]
    return []
