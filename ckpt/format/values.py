"""Values that are not tensors, as typed JSON: what was saved comes back, value and type.

``None``, booleans, text, ints below 2**53 and floats with a fraction stand for themselves, a JSON array for a
list; everything else is an object ``{"t": tag, ...}`` (SPEC.md has all tags). Nothing here runs code
from a checkpoint, and a value with no form is refused by name. Neither torch nor numpy is imported to encode.
"""

from __future__ import annotations

import base64
import collections
import datetime as dt
import enum
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ckpt.errors import UnsupportedValueError
from ckpt.format import records
from ckpt.format.names import float_text
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
from ckpt.format.values_decode import decode

__all__ = ["ModuleNode", "OptimizerNode", "RankRef", "TensorRef", "decode", "encode", "holds_nodes", "values_digest"]


def encode(tree: Any, where: str) -> Any:
    """``tree`` as JSON-able nodes; ``where`` names its root in errors, for example ``state['data']``.

    Raises UnsupportedValueError, naming the path, for a value that has no typed form.
    """
    try:
        return _Encoder().node(tree, where)
    except RecursionError:
        raise UnsupportedValueError(f"{where}: nested too deep for the stack that is left; flatten it") from None


def holds_nodes(tree: Any) -> bool:
    """Whether a module or an optimizer stands somewhere in ``tree``: such values differ between pipeline stages."""
    level = [tree]
    seen: set[int] = set()
    while level:
        value = level.pop()
        if isinstance(value, (ModuleNode, OptimizerNode)):
            return True
        if isinstance(value, (dict, list, tuple, collections.deque)) and id(value) not in seen:
            seen.add(id(value))
            level.extend(value.values() if isinstance(value, dict) else value)
    return False


def values_digest(node: Any) -> str:
    """The digest of an encoded value: equal for equal values, on every rank."""
    return records.digest(msgspec.json.encode(node, order="deterministic"))


class _Encoder:
    def __init__(self) -> None:
        self._open: set[int] = set()  # ids of the containers around the value at hand

    def node(self, value: Any, where: str) -> Any:
        # Few frames a level, so that 200 levels fit in Python's default of 1,000.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _ENCODE:
            return _ENCODE[kind](value)
        if kind not in _CONTAINERS:
            foreign = _foreign_node(value) if kind.__module__ in {"torch", "numpy"} else None
            if foreign is None:
                raise UnsupportedValueError(f"{where}: {_describe(value)} has no typed form; {_advice(value)}")
            return foreign
        if id(value) in self._open:
            raise UnsupportedValueError(f"{where}: contains itself; break the cycle")
        if len(self._open) >= MAX_DEPTH:
            raise UnsupportedValueError(f"{where}: nested deeper than {MAX_DEPTH} levels; flatten it")
        self._open.add(id(value))
        try:
            return _CONTAINERS[kind](self, value, where)
        finally:
            self._open.discard(id(value))

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        nodes = []  # a comprehension would be one more frame
        for index, value in enumerate(values):
            nodes.append(self.node(value, f"{where}[{index}]"))
        return nodes

    def pairs(self, mapping: dict[Any, Any], where: str) -> list[Any]:
        """[key, value, key, value, ...] in the mapping's order: JSON objects keep neither order nor key types."""
        flat: list[Any] = []
        if are_crowded(list(mapping)):
            raise UnsupportedValueError(f"{where}: more than {MAX_ALIKE} of its keys have one hash; use other keys")
        for key, value in mapping.items():
            inner = f"{where}[{short(key)}]"
            if not is_key(key):
                raise UnsupportedValueError(
                    f"{inner}: its key is {_describe(key)}; "
                    "keys are str, int, bool, float, None, bytes or tuples of them"
                )
            flat.append(self.node(key, inner))
            flat.append(self.node(value, inner))
        return flat


def _text_node(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON in UTF-8 cannot hold
        return {"t": "str", "v": _base64(text.encode("utf-8", "surrogatepass"))}
    return text


def _int_node(value: int) -> Any:
    return value if -SAFE_INT < value < SAFE_INT else {"t": "int", "v": hex(value)}


def _float_node(value: float) -> Any:
    # 1.0 is tagged, since many JSON writers turn it into 1, and -0.0, inf and NaN have no number in JSON.
    if math.isfinite(value) and not value.is_integer():
        return value
    return {"t": "float", "v": float_text(value)}


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _timezone_node(zone: dt.tzinfo | None) -> Any:
    if zone is None:
        return None
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [_ENCODE[dt.timedelta](offset), *(_text_node(text) for text in name)]


def _datetime_node(_: _Encoder, value: dt.datetime, where: str) -> Any:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise UnsupportedValueError(
            f"{where}: a datetime in {_describe(value.tzinfo)}; only datetime.timezone has a typed form, "
            "use .astimezone(datetime.timezone.utc)"
        )
    text = value.replace(tzinfo=None, fold=0).isoformat()
    return {"t": "datetime", "v": text, "fold": value.fold, "zone": _timezone_node(value.tzinfo)}


def _set_node(tag: str) -> Callable[[_Encoder, Any, str], Any]:
    def node(encoder: _Encoder, value: Any, where: str) -> Any:
        if are_crowded(list(value)):
            raise UnsupportedValueError(f"{where}: more than {MAX_ALIKE} of its items have one hash; use a list")
        # Sorted by their JSON, since the order of a set differs from process to process.
        items = [encoder.node(item, f"{where}{{{short(item)}}}") for item in value]
        return {"t": tag, "v": sorted(items, key=lambda item: msgspec.json.encode(item, order="deterministic"))}

    return node


def _defaultdict_node(encoder: _Encoder, value: collections.defaultdict[Any, Any], where: str) -> Any:
    factory = value.default_factory
    name = getattr(factory, "__name__", "") if factory is not None else None
    if name is not None and FACTORIES.get(name) is not factory:
        raise UnsupportedValueError(
            f"{where}: a defaultdict whose factory is {_describe(factory)}; only {', '.join(sorted(FACTORIES))} "
            "or None can be stored, pass dict(...) instead"
        )
    return {"t": "defaultdict", "factory": name, "v": encoder.pairs(value, where)}


_ENCODE: dict[type, Callable[[Any], Any]] = {
    str: _text_node,
    int: _int_node,
    float: _float_node,
    complex: lambda value: {"t": "complex", "v": [_float_node(value.real), _float_node(value.imag)]},
    bytes: lambda value: {"t": "bytes", "v": _base64(value)},
    bytearray: lambda value: {"t": "bytearray", "v": _base64(value)},
    range: lambda value: {"t": "range", "v": [_int_node(part) for part in (value.start, value.stop, value.step)]},
    dt.date: lambda value: {"t": "date", "v": value.isoformat()},
    dt.timedelta: lambda value: {"t": "timedelta", "v": [value.days, value.seconds, value.microseconds]},
    TensorRef: lambda value: {"t": "tensor", "name": _text_node(value.name)},
    RankRef: lambda value: {"t": "rank", "key": _text_node(value.key)},
}

_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: lambda encoder, value, where: encoder.items(value, where),
    tuple: lambda encoder, value, where: {"t": "tuple", "v": encoder.items(value, where)},
    set: _set_node("set"),
    frozenset: _set_node("frozenset"),
    collections.deque: lambda encoder, value, where: {
        "t": "deque",
        "maxlen": None if value.maxlen is None else _int_node(value.maxlen),
        "v": encoder.items(value, where),
    },
    slice: lambda encoder, value, where: {
        "t": "slice", "v": encoder.items((value.start, value.stop, value.step), where)
    },
    dict: lambda encoder, value, where: {"t": "dict", "v": encoder.pairs(value, where)},
    collections.OrderedDict: lambda encoder, value, where: {"t": "OrderedDict", "v": encoder.pairs(value, where)},
    collections.Counter: lambda encoder, value, where: {"t": "Counter", "v": encoder.pairs(value, where)},
    collections.defaultdict: _defaultdict_node,
    dt.datetime: _datetime_node,
    ModuleNode: lambda encoder, value, where: {
        "t": "module", "prefix": _text_node(value.prefix), "extra": encoder.pairs(value.extra, f"{where}.extra")
    },
    OptimizerNode: lambda encoder, value, where: {
        "t": "optimizer",
        "prefix": _text_node(value.prefix),
        "groups": encoder.items(value.groups, f"{where}.groups"),
        "state": encoder.pairs(value.state, f"{where}.state"),
    },
}  # fmt: skip


def _foreign_node(value: Any) -> Any:
    """The node of a torch dtype, size or device, or a numpy scalar; None for anything else of theirs."""
    kind = type(value)
    if kind.__module__ == "torch":
        if kind.__name__ == "Size":
            return {"t": "torch.Size", "v": [_int_node(int(side)) for side in value]}
        if kind.__name__ in ("dtype", "device"):
            return {"t": f"torch.{kind.__name__}", "v": str(value).removeprefix("torch.")}
        return None
    if kind.__name__ == "str_":
        return {"t": "numpy.str", "v": _text_node(str(value))}
    if kind.__name__ == "bytes_":
        return {"t": "numpy.bytes", "v": _base64(bytes(value))}
    if isinstance(value, sys.modules["numpy"].generic) and value.dtype.kind in NUMPY_KINDS:
        return {"t": "numpy", "dtype": value.dtype.str, "v": _base64(value.tobytes())}
    return None


def _describe(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if callable(value):
        own = getattr(value, "__qualname__", None) or name
        return f"a {name} ({own})" if isinstance(own, str) else f"a {name}"
    return f"a value of type {name}"


def _advice(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "store its .value or .name instead"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "store ._asdict() instead"
    if hasattr(type(value), "__dataclass_fields__"):
        return "store dataclasses.asdict(...) instead"
    if hasattr(value, "__fspath__"):
        return "store str(...) of it instead"
    if callable(value):
        return "functions and classes are code, store what they are made from instead"
    for base in (str, bytes, bool, int, float, complex, tuple, list, dict, set, frozenset, bytearray):
        if isinstance(value, base):
            return f"its subclass would be lost, store {base.__name__}(...) of it instead"
    return "give it state_dict and load_state_dict, or store plain values instead"
