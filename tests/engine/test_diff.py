from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ckpt.engine.diff import TensorChange, ValueChange, diff
from ckpt.errors import DamagedError, NotFoundError
from ckpt.format.values import OptimizerNode, RankRef
from ckpt.reading.step import StepReader
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, RankOwn, filled, write_step


@pytest.fixture
def run(tmp_path):
    return Run.open(tmp_path / "run")


def floats(*numbers, code="f"):
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def test_equal_steps(run, monkeypatch):
    """The same state saved twice has no difference, and by digest alone."""
    tensors = [HandTensor("x", "float32", (8, 8), filled((8, 8), "float32"), mesh=(2,), placements=("S0",))]
    for step in (1, 2):
        write_step(run, step, tensors, world=2, values={"a": [1, float("nan")]})
    monkeypatch.setattr(StepReader, "read", None)
    report = diff(run, 1, 2)
    assert (report.equal, report.tensors, report.values, report.equal_tensors) == (True, (), (), 1)


CUTS = [("zstd", (2,), ("S0",)), ("raw", (2,), ("S1",)), ("raw", None, ())]


@pytest.mark.parametrize(("encoding", "mesh", "placements"), CUTS)
def test_equal_however_they_are_stored(run, encoding, mesh, placements):
    """Encoding and cuts are not part of the state."""
    data = filled((8, 8), "float32")
    write_step(run, 1, [HandTensor("x", "float32", (8, 8), data, mesh=(2,), placements=("S0",))], world=2)
    write_step(
        run, 2, [HandTensor("x", "float32", (8, 8), data, mesh=mesh, placements=placements)], world=2, encoding=encoding
    )
    assert diff(run, 1, 2).equal


def test_what_changed(run):
    """Added, removed, reshaped and changed tensors are told apart; only the changed ones are read."""
    same = HandTensor("same", "uint8", (1000,), bytes(1000))
    write_step(
        run,
        1,
        [
            same,
            HandTensor("gone", "int8", (1,), b"a"),
            HandTensor("shape", "int8", (4,), b"abcd"),
            HandTensor("w", "float32", (4,), floats(0, 1, 2, 3)),
        ],
    )
    write_step(
        run,
        2,
        [
            same,
            HandTensor("new", "int8", (1,), b"a"),
            HandTensor("shape", "int8", (2, 2), b"abcd"),
            HandTensor("w", "float32", (4,), floats(0, 1.5, 2, 1)),
        ],
    )
    seen = []
    report = diff(run, 1, 2, lambda done, total: seen.append((done, total)))
    assert not report.equal
    assert report.equal_tensors == 1
    assert report.tensors == (
        TensorChange("new", "added", None, "int8 [1]"),
        TensorChange("w", "changed", "float32 [4]", "float32 [4]", 4, 2, 2.0),
        TensorChange("gone", "removed", "int8 [1]", None),
        TensorChange("shape", "reshaped", "int8 [4]", "int8 [2, 2]"),
    )
    assert seen[-1] == (32, 32)


@pytest.mark.parametrize(
    ("dtype", "old", "new", "changed", "largest"),
    [
        ("float64", floats(1, 2, code="d"), floats(1, 2.25, code="d"), 1, 0.25),
        ("float16", floats(1, 2, code="e"), floats(1.5, 3, code="e"), 2, 1.0),
        ("bfloat16", b"\x80\x3f\x00\x40", b"\x80\x3f\x80\x40", 1, 2.0),
        ("complex64", floats(0, 0, 1, 1), floats(3, 4, 1, 1), 1, 5.0),
        ("float32", floats(float("nan"), 1), floats(1, 1), 1, None),
        ("float32", floats(float("inf"), 1), floats(1, 1), 1, float("inf")),
        ("float32", floats(0.0, 1), floats(-0.0, 1), 1, 0.0),
        ("int64", bytes(16), bytes(15) + b"\1", 1, None),
        ("float8_e4m3fn", b"\0\1", b"\2\3", 2, None),
        ("complex128", bytes(32), bytes(31) + b"\1", 1, None),
        ("bool", b"\0\1", b"\0\0", 1, None),
    ],
)
def test_how_much_changed(run, dtype, old, new, changed, largest):
    """Elements whose bits differ are counted, and the largest distance is given for floating dtypes."""
    write_step(run, 1, [HandTensor("x", dtype, (2,), old)])
    write_step(run, 2, [HandTensor("x", dtype, (2,), new)])
    (change,) = diff(run, 1, 2).tensors
    assert change.changed_elements == changed
    if dtype != "complex128":
        assert change.max_abs_difference == largest


def test_values(run):
    """Values are compared by path, type and bits; lists of numbers are one value."""
    old = {"epoch": 1, "cfg": {"a": 1, "b": [1, 2], "x": "same"}, "gone": None}
    new = {"epoch": 2, "cfg": {"a": 1.0, "b": [1, 3], "x": "same"}, "o": OptimizerNode("o", [], {})}
    write_step(run, 1, [], values=old)
    write_step(run, 2, [], values=new)
    report = diff(run, 1, 2)
    assert report.equal_values == 1
    assert set(report.values) == {
        ValueChange("epoch", "1", "2"),
        ValueChange("cfg['a']", "1", "1.0"),
        ValueChange("cfg['b']", "[1, 2]", "[1, 3]"),
        ValueChange("gone", "None", None),
        ValueChange("o['optimizer']", None, "'o'"),
        ValueChange("o['groups']", None, "[]"),
        ValueChange("o['state']", None, "{}"),
    }


def test_what_each_rank_has(run):
    """Tensors and values of single ranks are compared rank by rank, when there are as many."""

    def own(*seeds):
        return [RankOwn({"seed": s}, (HandTensor("t", "uint8", (1,), bytes([s])),)) for s in seeds]

    write_step(run, 1, [], world=2, own=own(1, 2), values={"seed": RankRef("seed")})
    write_step(run, 2, [], world=2, own=own(1, 3), values={"seed": RankRef("seed")})
    write_step(run, 3, [], world=1, own=own(1), values={"seed": RankRef("seed")})
    report = diff(run, 1, 2)
    assert [change.name for change in report.tensors] == ["rank 1: t"]
    assert report.values == (ValueChange("rank 1: seed", "2", "3"),)
    report = diff(run, 1, 3)
    assert [(change.name, change.change) for change in report.tensors] == [("rank 1: t", "removed")]
    assert report.values == (ValueChange("values of each rank", "2 ranks", "1 ranks"),)


def test_a_tied_tensor_is_one_tensor(run):
    """Names of tied tensors are not compared twice, but a tie that is gone is a difference."""
    write_step(run, 1, [HandTensor("a", "uint8", (1,), b"a")], aliases={"b": "a"})
    write_step(run, 2, [HandTensor("a", "uint8", (1,), b"a")])
    report = diff(run, 1, 2)
    assert report.values == (ValueChange("tied: b", "'a'", None),)


def test_errors(run):
    """A step that is not there and a damaged chunk are errors, not differences."""
    for step in (1, 2):
        write_step(run, step, [HandTensor("x", "uint8", (100,), bytes([step]) * 100)])
    with pytest.raises(NotFoundError, match="no live step 7; live steps: 1, 2"):
        diff(run, 1, 7)
    path = next(Path(run.url).glob("step-00000002-*/state-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedError, match="x: chunk 0: digest"):
        diff(run, 1, 2)
