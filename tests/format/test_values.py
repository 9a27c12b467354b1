"""ckpt.format.values: what was saved comes back, value and type, or is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import struct
import subprocess
import sys
import zoneinfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedError, UnsupportedValueError
from ckpt.format.values import (
    ModuleNode,
    OptimizerNode,
    RankRef,
    TensorRef,
    decode,
    encode,
    holds_nodes,
    values_digest,
)


def through_json(tree):
    node = encode(tree, "state")
    return decode(msgspec.json.decode(msgspec.json.encode(node, order="deterministic")), "state")


def same(one, other):
    """Equal in value, type, order and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, np.floating)):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        kind = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return kind and same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, collections.deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


keys = st.one_of(
    st.text(st.characters()), st.integers(), st.booleans(), st.floats(allow_nan=False), st.none(), st.binary(),
    st.tuples(st.text(), st.integers()),
)  # fmt: skip
leaves = st.one_of(
    keys, st.floats(), st.complex_numbers(), st.datetimes(), st.dates(), st.timedeltas(), st.binary().map(bytearray)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.frozensets(keys, max_size=4),
        st.frozensets(keys, max_size=4).map(set),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, maxlen=7)),
    ),
    max_leaves=12,
)


@given(trees)
def test_round_trip(tree):
    """Any tree of supported values comes back through JSON: value, type, order and bits."""
    assert same(through_json(tree), tree)


VALUES = [
    20, 1e-3, "é", None, True, b"\x00\xff", (1, "a", None), [{"k": 1}, {"k": 2}], {}, [],
    collections.defaultdict(list, x=[1]), collections.defaultdict(None, {1: 2}), collections.OrderedDict(b=1, a=2),
    collections.Counter("abca"), 2**53 - 1, 2**53, -(2**53), 2**70, -(2**9999), 0.0, -0.0, 1.0, 1e300, 5e-324, 0.1,
    math.inf, -math.inf, math.nan, struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0], complex(-0.0, math.nan),
    "\ud800", "\0", {1: "int", "1": "str", 1.5: "float", None: 0, b"1": 0, (1, (2, "x")): 0}, {True: 1}, {0: 1},
    {0.0: 1, 2**20000: 2}, collections.deque([1, 2]), collections.deque([1, 2], maxlen=3), collections.deque(maxlen=0),
    range(5), range(2**70, 0, -3), slice(1, None, 2), slice("a", (1,), 0.5), {1, 2}, frozenset(),
    {frozenset({1}), (1, 2)}, bytearray(b"x"), {"t": "dict"}, {"t": {"t": 1}},
    dt.date(2024, 2, 29), dt.timedelta(-1, 5, 7),
    dt.datetime(2024, 1, 1),  # noqa: DTZ001 - a moment without a zone must stay without
    dt.datetime(2024, 1, 1, 1, 2, 3, 4, dt.UTC, fold=1),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, seconds=1), "odd")),
    np.float64(0.1), np.float32(0.1), np.float16(-0.0), np.int8(-5), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1j),
    np.str_("é"), np.str_(""), np.bytes_(b"a\0"), np.datetime64("2024-01-01T00:00:00", "ns"), np.timedelta64(5, "D"),
    np.float64("nan"), torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.Size([]), torch.device("cpu"),
    torch.device("cuda", 3), TensorRef("state.a.b"), RankRef("rng"),
    ModuleNode("model", {"head": [1, {"a": (2,)}]}),
    OptimizerNode("optimizer", [{"lr": 0.1, "params": ["a", "b"], "betas": (0.9, 0.999)}], {"a": {"step": 3}}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_value_and_type(value):
    """What was saved comes back, value and type."""
    assert same(through_json(value), value)
    assert same(through_json({"k": [value]}), {"k": [value]})


def test_numpy_scalars_keep_their_dtype():
    """Also where numpy's scalar is a float to Python."""
    for value in (np.float64(0.5), np.datetime64(1, "us"), np.int16(3)):
        assert through_json(value).dtype == value.dtype


def test_the_form_on_disk():
    """The JSON itself, as SPEC.md shows it."""
    state = {"epoch": 20, "lr": 1e-3, "loss": 1.0, "names": ("a", b"\xff"), 7: [2**60]}
    assert encode(state, "state") == {
        "t": "dict",
        "v": [
            "epoch", 20, "lr", 1e-3, "loss", {"t": "float", "v": "0x1.0000000000000p+0"},
            "names", {"t": "tuple", "v": ["a", {"t": "bytes", "v": "/w=="}]},
            7, [{"t": "int", "v": "0x1000000000000000"}],
        ],
    }  # fmt: skip


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


class Sub(dict):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 - the kind that users have


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Colour.RED, "store its .value"),
        (Pair(1, 2), r"store \._asdict\(\)"),
        (Point(), "dataclasses.asdict"),
        (Sub(), r"store dict\(...\) of it"),
        (pathlib.PurePosixPath("/a"), r"store str\(...\)"),
        (test_the_form_on_disk, "function .*test_the_form_on_disk.*code"),
        (print, "code"),
        (Point, "code"),
        (object(), "state_dict"),
        (torch.zeros(1), "a value of type torch.Tensor"),
        (np.zeros(1), "a value of type numpy.ndarray"),
        (np.float64, "code"),
        (np.zeros((), "f4,i4")[()], "numpy.void"),
        (torch.strided, "torch.layout"),
        (dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "only datetime.timezone"),
        (dt.time(1), "datetime.time"),
        (collections.defaultdict(lambda: 1), "a defaultdict whose factory is a function"),
        (iter([]), "list_iterator"),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_refuses_by_name(value, words):
    """A value without a typed form is refused with its path, its type and what to do."""
    with pytest.raises(UnsupportedValueError, match=words) as caught:
        encode({"a": [0, {"b": value}]}, "state['cfg']")
    assert str(caught.value).startswith("state['cfg']['a'][1]['b']: ")


def test_refuses_keys():
    """A key of another type is refused by path, also an enum or numpy scalar that passes for an int."""
    for key in (Colour.RED, np.int64(1), frozenset(), 1j, (1, (Colour.RED,))):
        with pytest.raises(UnsupportedValueError, match=r"^state\['x'\]\[.*\]: its key is a value of type"):
            encode({"x": {key: 1}}, "state")


def test_refuses_cycles_and_depth():
    """A value that contains itself, or is nested too deep, is refused; the same value twice is not."""
    ring = {"a": []}
    ring["a"].append(ring)
    with pytest.raises(UnsupportedValueError, match=r"^state\['a'\]\[0\]: contains itself"):
        encode(ring, "state")
    deep = []
    for _ in range(199):
        deep = [deep]
    assert through_json(deep) == deep
    with pytest.raises(UnsupportedValueError, match="nested deeper than 200"):
        encode([deep], "state")
    shared = [1]
    assert through_json([shared, shared]) == [[1], [1]]


def test_deepest_tree_through_json():
    """200 levels of the bulkiest container still pass JSON's own limit of nesting."""
    deep = {}
    for _ in range(199):
        deep = {"k": deep}
    assert through_json(deep) == deep


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (2**53, "must be tagged"),
        (10**500, "must be tagged"),
        (1.0, "must be tagged"),
        (math.nan, "must be tagged"),
        ({}, "the tag None is unknown"),
        ({"t": "pickle", "v": "gASV"}, "the tag 'pickle' is unknown"),
        ({"t": ["dict"], "v": []}, "the tag .* is unknown"),
        ({"t": "dict"}, r"has the fields \['t'\], expected \['t', 'v'\]"),
        ({"t": "dict", "v": [], "w": 1}, "has the fields"),
        ({"t": "dict", "v": {}}, "expected a list"),
        ({"t": "dict", "v": [1]}, "a key without a value"),
        ({"t": "dict", "v": ["a", 1, "a", 2]}, "the key 'a' twice"),
        ({"t": "dict", "v": [1, 1, True, 2]}, "the key True twice"),
        ({"t": "dict", "v": [[], 1]}, r"the key \[\]"),
        ({"t": "dict", "v": [{"t": "frozenset", "v": []}, 1]}, "the key frozenset"),
        ({"t": "set", "v": [[1]]}, "unhashable"),
        ({"t": "set", "v": [1, 1]}, "an item twice"),
        ({"t": "tuple", "v": 3}, "expected a list"),
        ({"t": "int", "v": "0x1"}, "not the one spelling"),
        ({"t": "int", "v": "99999999999999999999"}, "not the one spelling"),
        ({"t": "int", "v": "zz"}, "not a readable int"),
        ({"t": "int", "v": 5}, "expected a str"),
        ({"t": "float", "v": "0x1.8000000000000p+0"}, "stands for itself"),
        ({"t": "float", "v": "1e999"}, "not a readable float"),
        ({"t": "complex", "v": [0.5]}, "1 items, expected 2"),
        ({"t": "complex", "v": [0.5, 1]}, "expected a float"),
        ({"t": "str", "v": "//8="}, "not a readable str"),
        ({"t": "bytes", "v": "a"}, "not a readable bytes"),
        ({"t": "bytes", "v": "YQ==\n"}, "not a readable bytes"),
        ({"t": "range", "v": [0, 1, 0]}, "must not be zero"),
        ({"t": "range", "v": [0, 1]}, "expected 3"),
        ({"t": "slice", "v": [0, 1]}, "expected 3"),
        ({"t": "deque", "maxlen": 1, "v": [1, 2]}, "2 items in a deque of at most 1"),
        ({"t": "deque", "maxlen": -1, "v": []}, "deque"),
        ({"t": "deque", "maxlen": "1", "v": []}, "deque"),
        ({"t": "defaultdict", "factory": "eval", "v": []}, "not a readable defaultdict"),
        ({"t": "date", "v": "2024-02-30"}, "not a readable date"),
        ({"t": "date", "v": "20240228"}, "not the one spelling"),
        ({"t": "datetime", "v": "2024-01-01", "fold": 0, "zone": None}, "not the one spelling"),
        ({"t": "datetime", "v": "2024-01-01T00:00:00", "fold": 7, "zone": None}, "not a readable datetime"),
        ({"t": "datetime", "v": "2024-01-01T00:00:00", "fold": 0, "zone": [5]}, "expected a timedelta"),
        ({"t": "timedelta", "v": [10**10, 0, 0]}, "not a readable timedelta"),
        ({"t": "numpy", "dtype": "O", "v": ""}, "the numpy dtype 'O'"),
        ({"t": "numpy", "dtype": "|O8", "v": "AAAAAAAAAAA="}, "the numpy dtype"),
        ({"t": "numpy", "dtype": "|V8", "v": "AAAAAAAAAAA="}, "the numpy dtype"),
        ({"t": "numpy", "dtype": "<f8,<f8", "v": "AAAAAAAAAAAAAAAAAAAAAA=="}, "numpy"),
        ({"t": "numpy", "dtype": "<f8", "v": "AAAA"}, "3 bytes for a numpy float64, expected 8"),
        ({"t": "numpy", "dtype": "<f9", "v": "AAAA"}, "not a readable numpy"),
        ({"t": "numpy", "dtype": "", "v": ""}, "numpy"),
        ({"t": "torch.dtype", "v": "load"}, "expected a dtype"),
        ({"t": "torch.dtype", "v": "no_such"}, "expected a dtype"),
        ({"t": "torch.device", "v": "not a device"}, "not a readable torch.device"),
        ({"t": "torch.Size", "v": ["2"]}, "expected a int"),
        ({"t": "tensor", "name": 5}, "expected a str"),
        ({"t": "module", "prefix": "model", "extra": [1, 2]}, "under a name that is no text"),
        ({"t": "optimizer", "prefix": "o", "groups": [[]], "state": []}, "expected a dict"),
        ({"t": "optimizer", "prefix": "o", "groups": [{"t": "dict", "v": []}], "state": []}, "expected a list"),
        ({"t": "optimizer", "prefix": "o", "groups": [], "state": ["a", 5]}, "not a dict per parameter"),
        (object(), "is no typed JSON"),
        ((1,), "is no typed JSON"),
    ],
)
def test_decode_refuses(node, words):
    """Anything that encode never gives is refused, saying where."""
    with pytest.raises(DamagedError, match=words) as caught:
        decode([0, node], "part: values['x']")
    assert str(caught.value).startswith("part: values['x'][1]")


def test_decode_refuses_depth():
    """Deep nesting is an error, never a crash."""
    node = []
    for _ in range(100_000):
        node = [node]
    with pytest.raises(DamagedError, match="nested deeper"):
        decode(node, "part")
    while node:  # take it apart without recursion
        node = node.pop()


fields = st.sampled_from(["t", "v", "name", "factory", "maxlen", "dtype", "fold", "zone"])
tags = st.sampled_from(["dict", "set", "deque", "numpy", "datetime", "range", "float", "torch.dtype", "<f4", "list"])
json_nodes = st.recursive(
    st.none() | st.integers() | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner | tags),
    max_leaves=10,
)


@given(json_nodes)
def test_decode_never_crashes(node):
    """Whatever JSON it meets, it gives a value or DamagedError."""
    try:
        decode(node, "part")
    except DamagedError:
        return


def test_digests_do_not_depend_on_the_process(tmp_path):
    """Equal values have equal digests in processes with other hash seeds, sets included."""
    code = (
        "from ckpt.format.values import encode, values_digest\n"
        "print(values_digest(encode({'s': {'a', 'b', 'c', 1, None}, 'f': frozenset('xyz')}, 's')))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1
    assert values_digest(encode([1], "s")) != values_digest(encode([True], "s"))


def test_encoding_imports_neither_torch_nor_numpy():
    """The keeper and the light verbs can encode and decode plain values without them."""
    code = (
        "import sys; from ckpt.format.values import *\n"
        "decode(encode({'a': (1, 2.5, {3})}, 's'), 's'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_holds_nodes():
    """Modules and optimizers are found wherever they stand."""
    assert holds_nodes({"a": [(ModuleNode("m", {}),)]})
    assert holds_nodes(OptimizerNode("o", [], {}))
    assert not holds_nodes({"a": [TensorRef("x"), RankRef("y"), {"t": "module"}]})
