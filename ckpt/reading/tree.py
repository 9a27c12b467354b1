"""Trees of values for readers that have no torch: joined over layouts, made readable, and laid out by path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import DamagedError
from ckpt.format import records
from ckpt.format.nodes import short
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef, encode

_TORCH_TAGS = ("torch.dtype", "torch.device")
_SHOWN_BYTES = 16
_SHOWN_BITS = 4096  # of an int in decimal: Python refuses some 4,300 digits, and takes time by their square before


def without_torch(node: Any) -> Any:
    """A node of typed JSON in which torch's dtypes, devices and sizes are plain text and tuples.

    Decoding it needs no torch. The text is what ``str`` gives: ``torch.float32``, ``cuda:0``. DamagedError for
    a node that is nested without end.
    """
    try:
        return _without_torch(node)
    except RecursionError:
        raise DamagedError("nested too deep for the stack that is left") from None


def _without_torch(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_torch(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = node.get("t")
    if tag in _TORCH_TAGS and isinstance(node.get("v"), str):
        return f"torch.{node['v']}" if tag == "torch.dtype" else node["v"]
    if tag == "torch.Size":
        return {**node, "t": "tuple"}
    return {key: _without_torch(value) for key, value in node.items()}


def merge_values(mine: Any, other: Any, where: str) -> Any:
    """The values of two layouts of one step as one tree.

    Modules and optimizers are joined (pipeline stages have one each of the same key), dicts are
    joined key by key, and anything else is the same in both: the save saw to that.
    """
    if isinstance(mine, ModuleNode) and isinstance(other, ModuleNode) and mine.prefix == other.prefix:
        return ModuleNode(prefix=mine.prefix, extra={**mine.extra, **other.extra})
    if isinstance(mine, OptimizerNode) and isinstance(other, OptimizerNode) and mine.prefix == other.prefix:
        groups = _merge_groups(mine.groups, other.groups)
        return OptimizerNode(prefix=mine.prefix, groups=groups, state={**mine.state, **other.state})
    if type(mine) is not type(other):
        raise DamagedError(f"{where}: a {type(mine).__name__} in one layout, a {type(other).__name__} in another")
    if isinstance(mine, dict):
        for key, value in other.items():
            mine[key] = merge_values(mine[key], value, where) if key in mine else value
    return mine


def _merge_groups(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Param groups joined by position: stages build their optimizers alike, each with its own parameters."""
    merged = []
    for i in range(max(len(mine), len(other))):
        group = dict((mine if i < len(mine) else other)[i])
        if i < len(mine) and i < len(other):
            have = set(group["params"])
            group["params"] = [*group["params"], *(name for name in other[i]["params"] if name not in have)]
        merged.append(group)
    return merged


def readable(tree: Any, tensor_text: Callable[[str], str] = lambda name: f"<tensor {name}>") -> Any:
    """A tree as JSON that people read: types that JSON has not become text. Not meant to be read back."""
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if isinstance(tree, int):
        return tree if tree.bit_length() <= _SHOWN_BITS else hex(tree)
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else str(tree)
    if isinstance(tree, TensorRef):
        return tensor_text(tree.name)
    if isinstance(tree, RankRef):
        return "<each rank's own>"
    if isinstance(tree, ModuleNode):
        extra = {"extra": readable(tree.extra, tensor_text)} if tree.extra else {}
        return {"module": tree.prefix, **extra}
    if isinstance(tree, OptimizerNode):
        state = {"state": readable(tree.state, tensor_text)} if tree.state else {}
        return {"optimizer": tree.prefix, "groups": readable(tree.groups, tensor_text), **state}
    if isinstance(tree, Mapping):
        result: dict[str, Any] = {}
        for key, value in tree.items():
            text = key if isinstance(key, str) else _text(key)
            while text in result:  # the keys 1 and "1" in one dict
                text = f"{text} ({type(key).__name__})"
            result[text] = readable(value, tensor_text)
        return result
    if isinstance(tree, (bytes, bytearray)):
        more = "..." if len(tree) > _SHOWN_BYTES else ""
        return f"<{len(tree)} bytes {bytes(tree[:_SHOWN_BYTES]).hex()}{more}>"
    if isinstance(tree, (list, tuple)) or type(tree).__name__ == "deque":
        return [readable(item, tensor_text) for item in tree]
    if isinstance(tree, (set, frozenset)):
        return sorted((readable(item, tensor_text) for item in tree), key=repr)
    return str(tree) if type(tree).__module__ == "datetime" else _text(tree)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an int in it has more digits than Python writes
        return short(value)


def leaves(tree: Any, path: str) -> dict[str, tuple[str, str]]:
    """Path -> (digest of type and value, readable text) of every leaf; an empty container is a leaf."""
    found: dict[str, tuple[str, str]] = {}
    _walk(tree, path, found)
    return found


def _walk(tree: Any, path: str, found: dict[str, tuple[str, str]]) -> None:
    if isinstance(tree, ModuleNode):
        tree = {"module": tree.prefix, **({"extra": tree.extra} if tree.extra else {})}
    elif isinstance(tree, OptimizerNode):
        tree = {"optimizer": tree.prefix, "groups": tree.groups, "state": tree.state}
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            _walk(value, f"{path}[{_text(key)}]", found)
        return
    if type(tree) in {list, tuple} and tree and not all(isinstance(item, (int, float)) for item in tree):
        for index, value in enumerate(tree):
            _walk(value, f"{path}[{index}]", found)
        return
    # Lists of numbers (states of random generators, above all) are one leaf: 600 lines say no more than one.
    found[path] = (records.digest(repr(encode(tree, path)).encode()), shortened(readable(tree)))


def shortened(value: Any, width: int = 60) -> str:
    """One line of a readable value; a long list says how many items it has."""
    if not isinstance(value, list):
        text = repr(value)
        return text if len(text) <= width else f"{text[: width - 3]}..."
    shown: list[str] = []
    room = width
    for item in value:
        text = shortened(item, max(24, width // 2))
        room -= len(text) + 2
        if room < 0 and shown:
            return f"[{', '.join(shown)}, ... {len(value)} items]"
        shown.append(text)
    return f"[{', '.join(shown)}]"
