"""Typed JSON back to values, bounded and strict: one spelling each, and DamagedError for anything else."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from ckpt.errors import DamagedError
from ckpt.format.names import float_from_text
from ckpt.format.nodes import (
    FACTORIES,
    MAX_ALIKE,
    MAX_DEPTH,
    NUMPY_KINDS,
    SAFE_INT,
    ModuleNode,
    OptimizerNode,
    RankRef,
    TensorRef,
    are_crowded,
    is_key,
    short,
)

T = TypeVar("T")

_NUMPY_DTYPE = re.compile(rf"[<>|][{NUMPY_KINDS}][0-9]{{1,2}}(\[[0-9]{{0,6}}[a-zA-Z]{{1,2}}\])?")


def decode(node: Any, where: str) -> Any:
    """The tree that ``encode`` turned into ``node``. Raises DamagedError for anything it never gives."""
    try:
        return _decode(node, where, 0)
    except RecursionError:
        raise DamagedError(f"{where}: nested too deep for the stack that is left") from None


def _decode(node: Any, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise DamagedError(f"{where}: nested deeper than {MAX_DEPTH} levels")
    if node is None or isinstance(node, (bool, str)):
        return node
    if isinstance(node, int):
        if not -SAFE_INT < node < SAFE_INT:
            raise DamagedError(f"{where}: the bare int {short(node)}; from 2**53 on an int must be tagged")
        return node
    if isinstance(node, float):
        if not math.isfinite(node) or node.is_integer():
            raise DamagedError(f"{where}: the bare float {node!r}; one without a fraction must be tagged")
        return node
    if isinstance(node, list):
        return [_decode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        raise DamagedError(f"{where}: {short(node)} is no typed JSON")
    tag = node.get("t")
    if not isinstance(tag, str) or tag not in _TAGS:
        raise DamagedError(f"{where}: the tag {short(tag)} is unknown; expected one of {', '.join(sorted(_TAGS))}")
    fields, make = _TAGS[tag]
    if node.keys() != fields:
        raise DamagedError(f"{where}: a {tag} node has the fields {sorted(map(str, node))}, expected {sorted(fields)}")
    try:
        return make(_Node(node, where, depth + 1))
    except (ValueError, TypeError, OverflowError, LookupError) as error:
        raise DamagedError(f"{where}: not a readable {tag} node ({error})") from None


class _Node:
    """One tagged node being decoded; its readers raise ValueError or TypeError, which ``_decode`` reports."""

    def __init__(self, node: dict[str, Any], where: str, depth: int) -> None:
        self.fields = node
        self._where = where
        self._depth = depth

    def value(self, field: str) -> Any:
        return _decode(self.fields[field], f"{self._where}.{field}", self._depth)

    def raw_text(self, field: str = "v") -> str:
        return _expect(self.fields[field], str)

    def text(self, field: str = "v") -> str:
        return _expect(self.value(field), str)

    def data(self, field: str = "v") -> bytes:
        return base64.b64decode(self.raw_text(field), validate=True)

    def items(self, field: str = "v", count: int | None = None) -> list[Any]:
        raw = _expect(self.fields[field], list)
        if count is not None and len(raw) != count:
            raise ValueError(f"{len(raw)} items, expected {count}")
        return [_decode(item, f"{self._where}[{index}]", self._depth) for index, item in enumerate(raw)]

    def ints(self, count: int | None = None) -> list[int]:
        return [_expect(item, int) for item in self.items("v", count)]

    def pairs(self, field: str = "v") -> dict[Any, Any]:
        flat = _expect(self.fields[field], list)
        if len(flat) % 2:
            raise ValueError("a key without a value")
        keys = []  # all of them first: see are_crowded
        for position in range(0, len(flat), 2):
            key = _decode(flat[position], f"{self._where} key {position // 2}", self._depth)
            if not is_key(key):
                raise ValueError(f"the key {short(key)}")
            keys.append(key)
        if are_crowded(keys):
            raise ValueError(f"more than {MAX_ALIKE} keys of one hash")
        mapping: dict[Any, Any] = {}
        for position, key in zip(range(0, len(flat), 2), keys, strict=True):
            if key in mapping:
                raise ValueError(f"the key {short(key)} twice")
            mapping[key] = _decode(flat[position + 1], f"{self._where}[{short(key)}]", self._depth)
        return mapping


def _expect(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"found {short(value)}, expected a {kind.__name__}")
    return value


def _int(node: _Node) -> int:
    text = node.raw_text()
    value = int(text, 16)
    if hex(value) != text or -SAFE_INT < value < SAFE_INT:
        raise ValueError("not the one spelling of this int")
    return value


def _float(node: _Node) -> float:
    value = float_from_text(node.raw_text())
    if math.isfinite(value) and not value.is_integer():
        raise ValueError("a float with a fraction stands for itself")
    return value


def _complex(node: _Node) -> complex:
    real, imag = (_expect(item, float) for item in node.items(count=2))
    return complex(real, imag)


def _surrogates(node: _Node) -> str:
    return node.data().decode("utf-8", "surrogatepass")


def _set(node: _Node) -> set[Any]:
    items = node.items()
    if are_crowded(items):
        raise ValueError(f"more than {MAX_ALIKE} items of one hash")
    found = set(items)
    if len(found) != len(items):
        raise ValueError("an item twice")
    return found


def _defaultdict(node: _Node) -> collections.defaultdict[Any, Any]:
    factory = None if node.fields["factory"] is None else FACTORIES[node.raw_text("factory")]
    return collections.defaultdict(factory, node.pairs())


def _deque(node: _Node) -> collections.deque[Any]:
    maxlen, items = node.value("maxlen"), node.items()
    if maxlen is not None and len(items) > _expect(maxlen, int):
        raise ValueError(f"{len(items)} items in a deque of at most {maxlen}")
    return collections.deque(items, maxlen)


def _date(node: _Node) -> dt.date:
    day = dt.date.fromisoformat(node.raw_text())
    if day.isoformat() != node.raw_text():
        raise ValueError("not the one spelling of this day")
    return day


def _datetime(node: _Node) -> dt.datetime:
    zone = None
    if node.fields["zone"] is not None:
        offset, *name = node.items("zone")
        zone = dt.timezone(_expect(offset, dt.timedelta), *(_expect(text, str) for text in name))
    moment = dt.datetime.fromisoformat(node.raw_text())
    if moment.tzinfo is not None or moment.isoformat() != node.raw_text():
        raise ValueError("not the one spelling of this moment")
    return moment.replace(fold=_expect(node.fields["fold"], int), tzinfo=zone)


def _numpy(node: _Node) -> Any:
    import numpy as np

    text = node.raw_text("dtype")
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise ValueError(f"the numpy dtype {short(text)}")
    dtype, data = np.dtype(text), node.data()
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a numpy {dtype}, expected {dtype.itemsize}")
    value = np.frombuffer(data, dtype)[0]
    repr(value)  # a ValueError for a moment that has no unit: whoever shows the value would meet it
    return value


def _numpy_str(node: _Node) -> Any:
    import numpy as np

    return np.str_(node.text())


def _numpy_bytes(node: _Node) -> Any:
    import numpy as np

    return np.bytes_(node.data())


def _torch_dtype(node: _Node) -> Any:
    name = node.raw_text()  # first: a reader without torch must not get it from a malformed node

    import torch

    # Not getattr: for some names torch imports whole rooms of its own.
    return _expect(vars(torch).get(name), torch.dtype)


def _torch_size(node: _Node) -> Any:
    sizes = node.ints()
    if not all(-(2**63) <= size < 2**63 for size in sizes):
        raise ValueError("a size beyond 64 bits")

    import torch

    return torch.Size(sizes)


def _torch_device(node: _Node) -> Any:
    name = node.raw_text()

    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _module(node: _Node) -> ModuleNode:
    extra = node.pairs("extra")
    if not all(type(fqn) is str for fqn in extra):
        raise ValueError("extra state under a name that is no text")
    return ModuleNode(node.text("prefix"), extra)


def _optimizer(node: _Node) -> OptimizerNode:
    groups = [_expect(group, dict) for group in node.items("groups")]
    for group in groups:
        if not all(type(name) is str for name in _expect(group.get("params"), list)):
            raise ValueError("a parameter name that is no text")
    state = node.pairs("state")
    if not all(type(name) is str and type(own) is dict for name, own in state.items()):
        raise ValueError("state that is not a dict per parameter name")
    return OptimizerNode(node.text("prefix"), groups, state)


_Make = Callable[[_Node], Any]


def _tag(make: _Make, fields: str = "v") -> tuple[frozenset[str], _Make]:
    return frozenset(("t", *fields.split())), make


_TAGS: dict[str, tuple[frozenset[str], _Make]] = {
    "int": _tag(_int),
    "float": _tag(_float),
    "complex": _tag(_complex),
    "str": _tag(_surrogates),
    "bytes": _tag(lambda node: node.data()),
    "bytearray": _tag(lambda node: bytearray(node.data())),
    "tuple": _tag(lambda node: tuple(node.items())),
    "dict": _tag(lambda node: node.pairs()),
    "OrderedDict": _tag(lambda node: collections.OrderedDict(node.pairs())),
    "defaultdict": _tag(_defaultdict, "factory v"),
    "Counter": _tag(lambda node: collections.Counter(node.pairs())),
    "set": _tag(_set),
    "frozenset": _tag(lambda node: frozenset(_set(node))),
    "deque": _tag(_deque, "maxlen v"),
    "range": _tag(lambda node: range(*node.ints(3))),
    "slice": _tag(lambda node: slice(*node.items(count=3))),
    "date": _tag(_date),
    "datetime": _tag(_datetime, "v fold zone"),
    "timedelta": _tag(lambda node: dt.timedelta(*node.ints(3))),
    "numpy": _tag(_numpy, "dtype v"),
    "numpy.str": _tag(_numpy_str),
    "numpy.bytes": _tag(_numpy_bytes),
    "torch.dtype": _tag(_torch_dtype),
    "torch.Size": _tag(_torch_size),
    "torch.device": _tag(_torch_device),
    "tensor": _tag(lambda node: TensorRef(node.text("name")), "name"),
    "rank": _tag(lambda node: RankRef(node.text("key")), "key"),
    "module": _tag(_module, "prefix extra"),
    "optimizer": _tag(_optimizer, "prefix groups state"),
}
