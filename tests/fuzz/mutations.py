"""Changes to records that leave them records: a JSON (or msgpack) tree with one or a few of its nodes altered."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

DEEP = 60  # of a nest that is put in

# What parsers have been seen to trip over: edges of integers, of text, of names and of the format's own words.
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 64, 65, 200, 1 << 24, (1 << 24) + 1, 2**31, 2**53, 2**61 - 1, 2**62, 2**63 - 1,
    2**63,
    2**64 - 1, 10**30, -(2**63), 0.0, -0.0, 0.5, 1e308, 1e-320,
    "", ".", "..", "/", "../../x", "/etc/passwd", "a\0b", "a\nb", "\x1b[2J", "\u202egnp", "é" * 300, "%", "%e", "%u",
    "%uD800",
    "%(a%,%i1%)", "%(" * 25, "%x0", "%i-0", "%f0x1p-1", "nan:7ff8000000000000", "__metadata__", "R", "S0", "S63",
    "S99", "S0/2",
    "S0/999999999999999999", "ckpt/1", "ckpt/2", "w7.3", "w0.0", "w1.999999999999999999", "raw", "zstd", "model",
    "optimizer",
    "state", "tensor", "ndarray", "float32", "bool", "float4_e2m1fn_x2", "complex128", "qint8", "F32", "U8", "BOOL",
    "0" * 32,
    "f" * 32, "F" * 32, "inf", "-inf", "AA==", "A", "9999-12-31", "9999-12-31T23:59:59.999999", "0x1fffffffffffffff",
    "0x" + "f" * 50,
    "<f8", "<M8[s]", "<m8[0D]", "|b1", "<c16", "<i3", "list", "cuda:0", "cpu", "meta", "cuda:99999999999999999999",
    "random",
    "not finite", "parity-00000-of-00001.xor", "step-00000300-w7.3",
]  # fmt: skip

KEYS = [
    "t",
    "v",
    "format",
    "name",
    "nbytes",
    "digest",
    "ranks",
    "dtype",
    "shape",
    "data_offsets",
    "__metadata__",
    "",
    "new",
    "fold",
]

TAGS = [
    "int", "float", "complex", "str", "bytes", "bytearray", "tuple", "dict", "OrderedDict", "defaultdict", "Counter",
    "set",
    "frozenset", "deque", "range", "slice", "date", "datetime", "timedelta", "numpy", "numpy.str", "numpy.bytes",
    "torch.dtype",
    "torch.Size", "torch.device", "tensor", "rank", "module", "optimizer",
]  # fmt: skip

Choose = Callable[[int], int]  # a number below n


def mutated(tree: Any, choose: Choose) -> Any:
    """``tree`` with one to three nodes altered; ``choose`` decides: hypothesis and random both serve."""
    for _ in range(1 + choose(3)):
        places = list(_places(tree))
        if not places:
            return _fresh(tree, choose)
        container, key = places[choose(len(places))]
        _alter(container, key, choose)
    return tree


def _places(tree: Any) -> Any:
    """Every (container, key or index) in a tree, outermost first; at most some thousands."""
    level, found = deque([tree]), 0
    while level and found < 5000:
        node = level.popleft()
        if isinstance(node, dict | list):
            for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
                found += 1
                yield node, key
                level.append(inner)


def _alter(container: Any, key: Any, choose: Choose) -> None:
    what = choose(7)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, list):
        container.extend([container[key]] * (1 + choose(4)))
    elif what in {1, 2}:
        if isinstance(container, dict):
            container[KEYS[choose(len(KEYS))]] = _fresh(container[key], choose)
        else:
            container.insert(key, _fresh(container[key], choose))
    elif what == 3 and isinstance(container, list) and len(container) > 1:
        other = choose(len(container))
        container[key], container[other] = container[other], container[key]
    else:
        container[key] = _fresh(container[key], choose)


def _fresh(old: Any, choose: Choose) -> Any:
    """Something in the place of ``old``: often near it, else from the list, else a new node or a nest."""
    what = choose(8)
    if what <= 2 and isinstance(old, int) and not isinstance(old, bool):
        return old + (-1, 1, 2**32)[what]
    if what == 0 and isinstance(old, str):
        cut = choose(len(old) + 1)
        return old[:cut] + chr((0x30, 0x2E, 0x25, 0x7F, 0x2028, 0x1F600)[choose(6)]) + old[cut + choose(2) :]
    if what == 1:
        return {"t": TAGS[choose(len(TAGS))], "v": old}
    if what == 2:
        nest = old
        for _ in range(choose(DEEP)):
            nest = [nest] if choose(2) else {"t": "tuple", "v": [nest]}
        return nest
    if what == 3:
        return [SCALARS[choose(len(SCALARS))] for _ in range(choose(4))]
    return SCALARS[choose(len(SCALARS))]


def json_mutated(raw: bytes, choose: Choose) -> bytes:
    """JSON with some nodes altered; ValueError when ``raw`` is none."""
    return _json_bytes(mutated(json.loads(raw), choose))


def msgpack_mutated(raw: bytes, choose: Choose) -> bytes:
    """msgpack with some nodes altered; ValueError when ``raw`` is none."""
    try:
        tree = mutated(msgspec.msgpack.decode(raw), choose)
        return msgspec.msgpack.encode(tree)
    except (msgspec.DecodeError, OverflowError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _json_bytes(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def chooser(seed: int) -> Choose:
    """Decisions by a seed."""
    return random.Random(seed).randrange
