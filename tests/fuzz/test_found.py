"""What fuzzing and looking for the worst case have found, each as a test of its kind."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from ckpt.errors import BadInputError, DamagedError, KeeperError, UnsupportedFormatError, UnsupportedValueError
from ckpt.format import layout, names, records, values
from ckpt.format.nodes import MAX_ALIKE
from ckpt.keeper import persist, protocol
from ckpt.reading.tree import readable, without_torch
from tests.fuzz.targets import a_task, read_commit
from tests.security.hostile import ROOT

PRIME = 2**61 - 1  # all of its multiples have the hash 0


def test_a_malformed_node_brings_no_torch():
    """A process that reads without torch gets none from a node that is none of torch's."""
    code = (
        "import sys\n"
        "from ckpt.errors import DamagedError\n"
        "from ckpt.format.values import decode\n"
        "from ckpt.reading.tree import without_torch\n"
        "for tag in ('torch.dtype', 'torch.device', 'torch.Size'):\n"
        "    try:\n"
        "        decode(without_torch({'t': tag, 'v': {'t': 'tuple', 'v': []}}), 'value')\n"
        "    except DamagedError:\n"
        "        pass\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [("_inductor", "expected a dtype"), ("load", "expected a dtype"), ("nothing", "expected a dtype")],
)
def test_a_dtype_is_looked_up_and_nothing_is_imported(name: str, words: str):
    """`torch.<name>` would import whole packages for some names."""
    before = set(sys.modules)
    with pytest.raises(DamagedError, match=words):
        values.decode({"t": "torch.dtype", "v": name}, "value")
    assert not [module for module in set(sys.modules) - before if module.startswith("torch._inductor")]


@pytest.mark.parametrize(
    "node",
    [
        {"t": "torch.Size", "v": [{"t": "int", "v": hex(2**70)}]},
        {"t": "numpy", "dtype": "<M8", "v": "AAAAAAAAAAA="},
    ],
)
def test_values_that_cannot_be_shown(node: object):
    """Whoever prints one would get an error that is none of ckpt's."""
    with pytest.raises(DamagedError):
        values.decode(node, "value")
    assert np.isnat(values.decode(values.encode(np.datetime64("NaT"), "value"), "value"))


def test_keys_of_one_hash():
    """They are refused on both sides, from the hundred-and-first on; what is saved can be read."""
    few = {PRIME * i: i for i in range(1, MAX_ALIKE + 1)}
    assert values.decode(values.encode(few, "value"), "value") == few
    assert values.decode(values.encode(set(few), "value"), "value") == set(few)
    many = {PRIME * i: i for i in range(1, MAX_ALIKE + 2)}
    for tree in (many, set(many), frozenset(many)):
        with pytest.raises(UnsupportedValueError, match="have one hash"):
            values.encode(tree, "value")
    flat = [part for i in many for part in (values.encode(i, ""), 0)]
    with pytest.raises(DamagedError, match="keys of one hash"):
        values.decode({"t": "dict", "v": flat}, "value")
    with pytest.raises(DamagedError, match="items of one hash"):
        values.decode({"t": "set", "v": flat[::2]}, "value")


def test_nests_are_refused_before_and_after_torch_is_left_out():
    """Both walk the tree; neither falls off the stack."""
    nest: list[object] = []
    for _ in range(900):
        nest = [nest]
    with pytest.raises(DamagedError, match="nested"):
        values.decode(nest, "value")
    deeper: list[object] = []
    for _ in range(5000):
        deeper = [deeper]
    with pytest.raises(DamagedError, match="nested too deep"):
        without_torch(deeper)


def test_long_numbers_can_be_shown():
    """Python prints no decimal number of more than some 4,300 digits, and takes long for less."""
    large = 1 << 20_000
    shown = json.dumps(readable({"a": large, large: [range(large), slice(large)]}), allow_nan=False)
    assert hex(large) in shown


def test_features_of_any_kind():
    """They are looked at before the record is checked, so they may be anything."""
    nest: object = 0
    for _ in range(300):
        nest = [nest]
    line = msgspec.json.encode({"format": "ckpt/1", "features": [nest, None, "x" * 500], "written_by": [[1]]})
    with pytest.raises(UnsupportedFormatError, match="unknown features"):
        read_commit(line)
    with pytest.raises(UnsupportedFormatError):
        read_commit(line.replace(b'"ckpt/1"', msgspec.json.encode(nest)))


def test_more_pieces_than_replicas():
    """Shards times pieces could be any number; with this there are no more than ranks."""
    mesh = layout.Mesh((2, 2), (0, 1, 2, 3))
    tensor = layout.Tensor("a", "state", "uint8", (8,), 0, ("R", "S0"), (0, 1, 1))
    made = layout.Layout(records.FORMAT, (mesh,), (tensor,), {})
    with pytest.raises(BadInputError, match="3 pieces of each shard; expected at most its 2 replicas"):
        layout.encode_layout(made)


def test_names_in_messages_are_cut():
    """A name can be as long as its file; what is said of it is not."""
    for text in ("%" * 10**6, "%(" + "a%," * 10**5, "a." + "%q" * 10**6):
        with pytest.raises(DamagedError) as caught:
            names.split_name(text)
        assert len(str(caught.value)) < 1000


def test_a_float_that_overflows():
    """Python says so by an OverflowError, which is no ValueError."""
    for text in ("%f0x1%2E0P2000000000000000", "a.%f-0x1p99999", "%(%f0x1p99999%)"):
        assert not names.is_name(text)
        with pytest.raises(DamagedError, match="not an escaped key"):
            names.split_name(text)


def test_tasks_that_cannot_be():
    """A world, step or rank that no COMMIT could have would keep the keeper busy for ever."""
    for change in ({"world": 2**62}, {"step": 2**63}, {"writer": 2**64}, {"save": -1}, {"rank": 2}, {"rank": -1}):
        with pytest.raises(BadInputError):
            persist.check_task(a_task(**change), 1 << 20)
    persist.check_task(a_task(), 1 << 20)


def test_frames_that_are_no_messages():
    """Bad text, nests without end, and a known tag with wrong fields, in both directions."""
    for body in (b"", b"\xc1", b"\x91" * 4000 + b"\xc0", b"\xa1\xff", msgspec.msgpack.encode({"type": "hello"})):
        for decoder in (protocol.from_client, protocol.from_keeper):
            with pytest.raises(KeeperError, match="no message"):
                protocol.message_of(body, decoder)
