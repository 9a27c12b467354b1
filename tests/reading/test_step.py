from __future__ import annotations

import itertools
import random
from math import prod
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, DamagedError, NotFoundError
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef, encode
from ckpt.plan.boxes import Box
from ckpt.reading.step import StepReader
from ckpt.reading.tree import leaves, merge_values, readable, shortened, without_torch
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, RankOwn, cut, filled, write_step
from tests.reading.boxes import some_boxes


@pytest.fixture
def run(tmp_path):
    return Run.open(tmp_path / "run")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 64 bytes, so that a small tensor has many of them, cut in the middle of rows."""
    for module in ("ckpt.format.chunk", "ckpt.reading.shards", "ckpt.reading.spans", "ckpt.reading.verify_files"):
        monkeypatch.setattr(f"{module}.CHUNK_NBYTES", 64)


CUTS = [
    (1, None, (), (7, 5)),
    (3, None, (), (7, 5)),
    (3, (3,), ("S0",), (7, 5)),
    (4, (4,), ("S0",), (6, 3)),  # the last rank has nothing
    (3, (3,), ("S1",), (5, 7)),
    (4, (2, 2), ("S0", "S1"), (5, 7)),
    (4, (2, 2), ("S1", "S0"), (5, 7, 3)),
    (4, (2, 2), ("S0", "S0"), (9, 4)),
    (4, (2, 2), ("S0/2", "S0"), (9, 4)),
    (4, (2, 2), ("R", "S2"), (3, 4, 5)),
    (2, (2,), ("S0",), (1, 40)),
    (2, None, (), ()),
    (2, (2,), ("S0",), (0, 3)),
]


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
@pytest.mark.parametrize(("world", "mesh", "placements", "shape"), CUTS)
def test_any_box_of_any_cut(run, small_chunks, encoding, world, mesh, placements, shape):
    """The whole tensor and random boxes come back bit for bit, whatever pieces it was stored in."""
    data = {dtype: filled(shape, dtype) for dtype in ("float32", "bfloat16", "complex128", "int8")}
    tensors = [HandTensor(dtype, dtype, shape, data[dtype], "state", mesh, placements) for dtype in data]
    write_step(run, 1, tensors, world=world, encoding=encoding)
    reader = StepReader.open(run)
    choose = random.Random(0)
    for dtype, whole in data.items():
        for box in some_boxes(shape, choose, 8):
            into = bytearray(b"\xaa" * (box.numel * DTYPE_NBYTES[dtype]))
            reader.read(dtype, box, memoryview(into))
            assert bytes(into) == (cut(whole, shape, box, dtype) if box.numel else b""), box


@pytest.mark.parametrize("dtype", sorted(DTYPE_NBYTES))
def test_every_dtype(run, dtype):
    """Every dtype of the format comes back bit for bit, cut along the last dimension."""
    data = filled((3, 4), dtype)
    write_step(run, 1, [HandTensor("x", dtype, (3, 4), data, "state", (2,), ("S1",))], world=2)
    into = bytearray(len(data))
    StepReader.open(run).read("x", None, memoryview(into))
    assert bytes(into) == data


def test_more_than_one_real_chunk(run):
    """A shard of more than 16 MiB is read chunk by chunk, into place and through the bounce buffer."""
    shape = (5, 1 << 20)
    data = bytes(random.Random(0).randbytes(prod(shape) * 4))
    write_step(run, 1, [HandTensor("x", "float32", shape, data)])
    reader = StepReader.open(run)
    into = bytearray(len(data))
    reader.read("x", None, memoryview(into))
    assert bytes(into) == data
    box = Box((3, 17), (2, 1 << 19))
    part = bytearray(box.numel * 4)
    reader.read("x", box, memoryview(part))
    assert bytes(part) == cut(data, shape, box, "float32")


def test_only_needed_chunks_are_read(run, small_chunks):
    """Reading one row reads the chunks that have it, not the shard."""
    write_step(run, 1, [HandTensor("x", "uint8", (100, 64), filled((100, 64), "uint8"))])
    reader, seen = StepReader.open(run), []
    reader.read("x", Box((7, 0), (1, 64)), memoryview(bytearray(64)), seen.append)
    assert seen == [64]


def test_tied_names_and_stages(run):
    """Pipeline stages with layouts of their own read as one step; a tied name reads its original."""
    tensors = [
        HandTensor("model.first", "int32", (4,), filled((4,), "int32", 1), "model", ranks=(0, 1)),
        HandTensor("model.both", "int32", (6,), filled((6,), "int32", 2), "model"),
        HandTensor("model.last", "int32", (4,), filled((4,), "int32", 3), "model", (2,), ("S0",), ranks=(2, 3)),
    ]
    values = {"model": ModuleNode("model", {})}
    write_step(run, 1, tensors, world=4, aliases={"model.head": "model.first"}, values=values)
    reader = StepReader.open(run)
    assert len(reader.commit.layouts) == 2
    assert list(reader.tensors()) == ["model.first", "model.both", "model.last"]
    for name, tensor in {**{t.name: t for t in tensors}, "model.head": tensors[0]}.items():
        into = bytearray(len(tensor.data))
        reader.read(name, None, memoryview(into))
        assert bytes(into) == tensor.data
    assert reader.values() == {"model": ModuleNode("model", {})}


def test_what_only_one_rank_has(run):
    """Tensors and values of one rank are read by rank."""
    own = [RankOwn({"seed": r}, (HandTensor("rng", "uint8", (3,), bytes([r] * 3)),)) for r in range(2)]
    write_step(run, 1, [], world=2, own=own, values={"seed": RankRef("seed")})
    reader = StepReader.open(run)
    for rank in range(2):
        into = bytearray(3)
        reader.read("rng", None, memoryview(into), rank=rank)
        assert bytes(into) == bytes([rank] * 3)
        assert reader.rank_values(rank) == {"seed": rank}
    assert reader.values() == {"seed": RankRef("seed")}


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_a_bad_chunk_is_named(run, small_chunks, encoding):
    """A flipped bit raises DamagedError with file, tensor, box, chunk and both digests."""
    data = bytes(range(128)) * 4
    tensor = HandTensor("x", "uint8", (8, 64), data, mesh=(2,), placements=("S0",))
    attempt = write_step(run, 1, [tensor], world=2, encoding=encoding)
    reader = StepReader.open(run)
    file = reader.part(1).files[0]
    path = Path(run.url) / run.key(attempt, file.name)
    content = bytearray(path.read_bytes())
    content[file.header_nbytes + 65 if encoding == "raw" else file.packed[1].offset + file.packed[1].nbytes - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=rf"{file.name}: x\[4:8,0:64\]: chunk 1: ") as caught:
        reader.read("x", None, memoryview(bytearray(512)))
    if encoding == "raw":
        assert file.chunks[1] in str(caught.value)
        assert len(str(caught.value).split("digest ")[1].split(",")[0]) == 32


def test_wrong_questions(run):
    """An unknown name and a buffer of the wrong size are refused, and a missing file is damage."""
    attempt = write_step(run, 1, [HandTensor("x", "uint8", (4,), b"abcd")])
    reader = StepReader.open(run)
    with pytest.raises(NotFoundError, match="no tensor 'y'"):
        reader.read("y", None, memoryview(bytearray(4)))
    with pytest.raises(BadInputError, match="a buffer of 3 bytes for 4 elements of uint8"):
        reader.read("x", None, memoryview(bytearray(3)))
    run.store.delete(run.key(attempt, reader.part(0).files[0].name))
    with pytest.raises(DamagedError, match="missing, though COMMIT needs it"):
        reader.read("x", None, memoryview(bytearray(4)))


def test_few_tables_stay_in_memory(run, monkeypatch):
    """The tables of ranks are forgotten when there are too many of them, and read again."""
    monkeypatch.setattr("ckpt.reading.step.CACHED_SHARDS", 3)
    tensors = [HandTensor(f"t{i}", "uint8", (8,), bytes([i] * 8), mesh=(4,), placements=("S0",)) for i in range(2)]
    write_step(run, 1, tensors, world=4)
    reader = StepReader.open(run)
    for _, tensor in itertools.product(range(2), tensors):
        into = bytearray(8)
        reader.read(tensor.name, None, memoryview(into))
        assert bytes(into) == tensor.data
        assert len(reader._tables) == 1


def test_values_without_torch():
    """Torch's own values come as text and tuples when torch must not be imported."""
    node = {"t": "dict", "v": ["a", {"t": "torch.dtype", "v": "bfloat16"}, "b", {"t": "torch.Size", "v": [2]}]}
    assert without_torch(node) == {"t": "dict", "v": ["a", "torch.bfloat16", "b", {"t": "tuple", "v": [2]}]}


def test_values_of_stages_are_joined():
    """Modules and optimizers of pipeline stages become one; a plain value must not differ in type."""
    a = {"m": ModuleNode("m", {"x": 1}), "o": OptimizerNode("o", [{"lr": 1, "params": ["a"]}], {"a": {"k": 1}})}
    b = {"m": ModuleNode("m", {"y": 2}), "o": OptimizerNode("o", [{"lr": 1, "params": ["a", "b"]}], {"b": {"k": 2}})}
    assert merge_values(a, b, "here") == {
        "m": ModuleNode("m", {"x": 1, "y": 2}),
        "o": OptimizerNode("o", [{"lr": 1, "params": ["a", "b"]}], {"a": {"k": 1}, "b": {"k": 2}}),
    }
    with pytest.raises(DamagedError, match="here: a int in one layout, a str in another"):
        merge_values(1, "1", "here")


def test_readable_values():
    """What JSON has no form for becomes text that says what it is; equal keys of other types stay apart."""
    tree = {1: (1, {2}), "1": b"\x00" * 20, "f": [float("nan"), -0.0], "t": TensorRef("w"), "r": RankRef("q")}
    assert readable(tree) == {
        "1": [1, [2]],
        "1 (str)": "<20 bytes 00000000000000000000000000000000...>",
        "f": ["nan", -0.0],
        "t": "<tensor w>",
        "r": "<each rank's own>",
    }


def test_long_values_are_shortened():
    """One line of bounded length: long lists say how many items they have."""
    assert shortened([0, 1]) == "[0, 1]"
    assert shortened(list(range(600)), 20) == "[0, 1, 2, 3, 4, 5, ... 600 items]"
    assert shortened("x" * 99, 20) == "'xxxxxxxxxxxxxxxx..."
    assert len(shortened([["y" * 80] * 80] * 80, 60)) < 120


def test_leaves_tell_types_apart():
    """1, 1.0 and True are three values; -0.0 is not 0.0; nan is itself."""
    digests = [leaves(value, "x")["x"][0] for value in (1, 1.0, True, 0.0, -0.0, "1", (1,), [1])]
    assert len(set(digests)) == len(digests)
    assert leaves(float("nan"), "x") == leaves(float("nan"), "x")
    assert encode(float("nan"), "x") == encode(float("nan"), "x")
