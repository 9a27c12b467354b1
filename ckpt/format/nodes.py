"""The nodes of typed JSON that stand for what is stored elsewhere, and what its two directions share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

MAX_DEPTH = 200  # containers in containers
MAX_ALIKE = 100  # keys of one dict, or items of one set, that have one hash
SAFE_INT = 2**53  # below it, every JSON reader keeps an int exact
NUMPY_KINDS = "biufcmM"  # of numpy.dtype.kind: scalars that are their bytes
FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, frozenset, int, float, str, tuple, bool, bytes)
}
_KEY_KINDS = (str, int, bool, float, type(None), bytes)


def is_key(key: Any, depth: int = 0) -> bool:
    """Whether ``key`` may be a dict's key: of exactly these types, or tuples of them."""
    if type(key) is tuple:
        return depth < MAX_DEPTH and all(is_key(item, depth + 1) for item in key)
    return type(key) in _KEY_KINDS


def are_crowded(keys: Collection[Any]) -> bool:
    """Whether so many of ``keys`` have one hash that a dict of them takes time by the square of their number.

    Python's hashes of numbers are no secret: all multiples of 2**61 - 1 have the same one. ``keys`` is no dict or set
    of them, or the harm is done. TypeError for what cannot be a key.
    """
    if len(keys) <= MAX_ALIKE:
        return False
    return max(Counter(map(hash, keys)).values()) > MAX_ALIKE


def text_of(value: Any) -> str:
    """What should have been a short text, for messages: itself, cut, or what else it is."""
    return value[:64] if isinstance(value, str) else short(value)


def short(value: Any) -> str:
    """``repr`` for messages: never long, and never an error itself."""
    if isinstance(value, (list, dict, tuple)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)} items"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints, or deep nesting
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 60 else text[:57] + "..."


class TensorRef(msgspec.Struct, frozen=True):
    """Stands for a stored tensor: ``name`` is its name in the layout or among the rank's tensors."""

    name: str


class RankRef(msgspec.Struct, frozen=True):
    """Stands for this rank's own value: ``Part.rank_values[key]``."""

    key: str


class ModuleNode(msgspec.Struct, frozen=True):
    """A module: all layout tensors (and aliases) named ``prefix + "." + fqn``; ``extra``: fqn -> extra state."""

    prefix: str
    extra: dict[str, Any]


class OptimizerNode(msgspec.Struct, frozen=True):
    """An optimizer. ``groups``: its settings, with ``"params"`` as a list of parameter names.

    ``state``: parameter name -> {state key: value} for what is no tensor; tensors are the
    layout's ``prefix + ".state.<state key>.<parameter name>"``.
    """

    prefix: str
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
