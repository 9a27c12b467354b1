from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors

from ckpt.engine.export import restore
from ckpt.errors import BadInputError, DamagedError, NotFoundError
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, RankOwn, filled, write_step

SUB_BYTE = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}


@pytest.fixture
def run(tmp_path):
    return Run.open(tmp_path / "run")


def stored(path):
    """Key -> (dtype, shape, bytes) as the safetensors package itself reads the file."""
    return {key: (t["dtype"], t["shape"], bytes(t["data"])) for key, t in safetensors.deserialize(path.read_bytes())}


def write_model(run, step=10, encoding="raw"):
    tensors = [
        HandTensor("model.emb.weight", "bfloat16", (64, 8), filled((64, 8), "bfloat16"), "model", (4,), ("S0",)),
        HandTensor("model.w", "float32", (13, 7), filled((13, 7), "float32"), "model", (2, 2), ("S0", "S1")),
        HandTensor("model.empty", "float32", (0, 7), b"", "model"),
        HandTensor("optimizer.state.exp_avg.w", "float32", (13, 7), bytes(364), "optimizer", (2, 2), ("S1", "R")),
        HandTensor("optimizer.state.step.w", "float32", (), b"\0\0\x80?", "optimizer"),
        HandTensor("mask", "bool", (3,), b"\1\0\1"),
        HandTensor("scale", "complex128", (2,), filled((2,), "complex128")),
        HandTensor("a%2Eb", "int16", (2,), b"abcd", kind="ndarray"),
    ]
    own = [
        RankOwn({"rng": {"n": r, "t": TensorRef("rng.t")}}, (HandTensor("rng.t", "uint8", (2,), bytes([r, 7])),))
        for r in range(4)
    ]
    values = {
        "model": ModuleNode("model", {"w._extra_state": {"calls": 3}}),
        "optimizer": OptimizerNode(
            "optimizer", [{"lr": 0.5, "betas": (0.9, 0.95), "params": ["emb.weight", "w"]}], {"w": {"n": 2**70}}
        ),
        "mask": TensorRef("mask"),
        "list": [TensorRef("scale"), {"a.b": TensorRef("a%2Eb")}, None, (1, 2.0)],
        "rng": RankRef("rng"),
        "odd": {1: collections.OrderedDict(b=1, a=2), "deque": collections.deque([1], 2), "f": frozenset("x")},
    }
    aliases = {"model.head.weight": "model.emb.weight"}
    write_step(run, step, tensors, world=4, values=values, own=own, aliases=aliases, encoding=encoding)
    return {tensor.name: tensor for tensor in tensors}


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_safetensors(run, tmp_path, encoding):
    """Every tensor comes back whole and bit for bit, under the names that people expect."""
    tensors = write_model(run, encoding=encoding)
    seen = []
    report = restore(run, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    model, optimizer, state = (stored(tmp_path / "out" / f"{g}.safetensors") for g in ("model", "optimizer", "state"))
    assert model == {
        "emb.weight": ("BF16", [64, 8], tensors["model.emb.weight"].data),
        "w": ("F32", [13, 7], tensors["model.w"].data),
        "empty": ("F32", [0, 7], b""),
    }
    assert optimizer == {
        "state.exp_avg.w": ("F32", [13, 7], bytes(364)),
        "state.step.w": ("F32", [], b"\0\0\x80?"),
    }
    assert state == {
        "mask": ("BOOL", [3], b"\1\0\1"),
        "scale": ("U8", [32], tensors["scale"].data),
        "a%2Eb": ("I16", [2], b"abcd"),
        **{f"rng.t[rank {r}]": ("U8", [2], bytes([r, 7])) for r in range(4)},
    }
    assert report.files == {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()}
    assert (report.step, report.attempt, report.tensors) == (10, "w1.1", 8 + 4)
    assert seen[-1] == (report.tensor_nbytes, report.tensor_nbytes)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert json.loads(file.metadata()["ckpt.aliases"]) == {"model.head.weight": "model.emb.weight"}
    with safetensors.safe_open(tmp_path / "out" / "state.safetensors", "np") as file:
        assert json.loads(file.metadata()["ckpt.stored_as_bytes"]) == {"scale": "complex128 [2]"}


def test_values_json(run, tmp_path):
    """values.json has what is no tensor: readable, and as typed JSON."""
    write_model(run)
    restore(run, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "values.json").read_text())
    assert (values["step"], values["attempt"]) == (10, "w1.1")
    assert values["values"]["list"] == [
        "<tensor scale: complex128 [2]>",
        {"a.b": "<tensor a%2Eb: int16 [2]>"},
        None,
        [1, 2.0],
    ]
    assert values["values"]["optimizer"]["state"] == {"w": {"n": 2**70}}
    assert [own["rng"]["n"] for own in values["rank_values"]] == [0, 1, 2, 3]
    assert values["typed"]["values"][0]["values"]["odd"]["t"] == "dict"
    assert values["aliases"] == {"model.head.weight": "model.emb.weight"}


def load_torch(path):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "ComplexHalf support is experimental"
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_torch(run, tmp_path, encoding):
    """One file that torch.load(weights_only=True) opens, with state dicts under the top-level keys."""
    import torch

    tensors = write_model(run, encoding=encoding)
    report = restore(run, tmp_path / "out", file_format="torch")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["step-10.pt"] == list(report.files)
    state = load_torch(tmp_path / "out" / "step-10.pt")

    def raw(tensor):
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    assert list(state["model"]) == ["emb.weight", "w", "empty", "head.weight", "w._extra_state"]
    assert state["model"]["emb.weight"].dtype == torch.bfloat16
    assert state["model"]["empty"].shape == (0, 7)
    assert raw(state["model"]["w"]) == tensors["model.w"].data
    assert state["model"]["head.weight"].data_ptr() == state["model"]["emb.weight"].data_ptr()
    assert state["model"]["w._extra_state"] == {"calls": 3}
    optimizer = state["optimizer"]
    assert optimizer["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.95), "params": ["emb.weight", "w"]}]
    assert list(optimizer["state"]["w"]) == ["n", "exp_avg", "step"]
    assert optimizer["state"]["w"]["step"].item() == 1.0
    assert raw(state["list"][0]) == tensors["scale"].data
    assert state["list"][0].dtype == torch.complex128
    assert state["list"][1]["a.b"].tolist() == [25185, 25699]
    assert state["list"][2:] == [None, (1, 2.0)]
    assert [(own["n"], own["t"].tolist()) for own in state["rng"]] == [(r, [r, 7]) for r in range(4)]
    assert state["odd"] == {1: {"b": 1, "a": 2}, "deque": [1], "f": {"x"}}
    assert type(state["odd"][1]) is collections.OrderedDict


def test_every_dtype(run, tmp_path):
    """Every dtype is restored bit for bit in both formats; torch's file has the true dtypes that it can hold."""
    import torch

    tensors = [HandTensor(d, d, (3, 4), filled((3, 4), d), "state", (2,), ("S1",)) for d in sorted(DTYPE_NBYTES)]
    write_step(run, 1, tensors, world=2, values={t.name: TensorRef(t.name) for t in tensors})
    restore(run, tmp_path / "a")
    found = {key: data for key, (_, _, data) in stored(tmp_path / "a" / "state.safetensors").items()}
    assert found == {t.name: t.data for t in tensors}
    restore(run, tmp_path / "b", file_format="torch")
    loaded = load_torch(tmp_path / "b" / "step-1.pt")
    for tensor in tensors:
        wanted = torch.uint8 if tensor.dtype in SUB_BYTE else getattr(torch, tensor.dtype)
        assert (loaded[tensor.name].dtype, loaded[tensor.name].shape) == (wanted, (3, 4))
        assert bytes(loaded[tensor.name].untyped_storage()) == tensor.data, tensor.dtype


def test_an_older_step(run, tmp_path):
    """--step N restores that step, and a step that is not there is NotFoundError with nothing made."""
    write_step(run, 1, [HandTensor("x", "uint8", (2,), b"ab")])
    write_step(run, 2, [HandTensor("x", "uint8", (2,), b"cd")])
    restore(run, tmp_path / "out", 1)
    assert stored(tmp_path / "out" / "state.safetensors")["x"][2] == b"ab"
    with pytest.raises(NotFoundError, match="no live step 3; live steps: 1, 2"):
        restore(run, tmp_path / "other", 3)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_damage_leaves_nothing(run, tmp_path, file_format):
    """A bad chunk is DamagedError, and the destination is as before: absent, or empty."""
    write_model(run)
    path = next(Path(run.url).glob("step-*/state-00002-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{path.name}: rng.t: chunk 0: digest"):
        restore(run, tmp_path / "deep" / "out", file_format=file_format)
    assert not (tmp_path / "deep").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DamagedError):
        restore(run, tmp_path / "empty", file_format=file_format)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_interruption_leaves_nothing(run, tmp_path, file_format):
    """Ctrl-C in the middle removes what was written."""
    write_model(run)

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(run, tmp_path / "out", file_format=file_format, progress=stop)
    assert not (tmp_path / "out").exists()


def test_destinations_that_are_refused(run, tmp_path):
    """A folder with something in it, a file, a URL and a folder inside the run are refused and left alone."""
    write_step(run, 1, [HandTensor("x", "uint8", (2,), b"ab")])
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("data")
    with pytest.raises(BadInputError, match=r"is not empty \(it holds precious\); give a new or an empty folder"):
        restore(run, full)
    assert [p.read_text() for p in full.iterdir()] == ["data"]
    with pytest.raises(BadInputError, match="is a file; give a new or an empty folder"):
        restore(run, full / "precious")
    with pytest.raises(BadInputError, match="restore writes to a local folder"):
        restore(run, "s3://bucket/x")
    with pytest.raises(BadInputError, match="lies inside the run"):
        restore(run, Path(run.url) / "out")
    with pytest.raises(BadInputError, match="format 'onnx': expected one of safetensors, torch"):
        restore(run, tmp_path / "out", file_format="onnx")


def test_a_destination_that_cannot_be_made(run, tmp_path):
    """A path below a file is refused, and named."""
    write_step(run, 1, [HandTensor("x", "uint8", (2,), b"ab")])
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"file/out: is a file, or lies below one"):
        restore(run, tmp_path / "file" / "out")


FULL_DISK = """
import resource, signal, sys
from ckpt.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(["restore", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_a_full_disk_leaves_nothing(run, tmp_path, file_format):
    """When the disk takes no more, one sentence names the file, exit code 8, and what was written is removed."""
    write_step(
        run, 1, [HandTensor("x", "uint8", (90_000,), bytes(90_000)), HandTensor("y", "uint8", (20_000,), bytes(20_000))]
    )
    words = [sys.executable, "-c", FULL_DISK, run.url, str(tmp_path / "out"), "--format", file_format]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 8, done.stderr
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "out") in done.stderr
    assert not (tmp_path / "out").exists()


PEAK = """
import sys
from ckpt.engine.export import restore
if sys.argv[3] == "torch":
    import torch
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
restore(sys.argv[1], sys.argv[2], file_format=sys.argv[3])
print(peak() - before)
"""


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_memory_is_bounded_by_the_largest_tensor(run, tmp_path, file_format):
    """Restoring many tensors of 16 MiB, cut two ways, takes less than 2 tensors and a constant of memory."""
    count, constant = (10, 24 << 20) if file_format == "safetensors" else (16, 128 << 20)  # torch's own is larger
    shape, nbytes = (64, 1 << 16), 16 << 20
    block = os.urandom(nbytes)
    tensors = [HandTensor(f"t{i}", "float32", shape, block, "state", (2,), (f"S{i % 2}",)) for i in range(count)]
    write_step(run, 1, tensors, world=2, values={t.name: TensorRef(t.name) for t in tensors})
    words = [sys.executable, "-W", "ignore", "-c", PEAK, run.url, str(tmp_path / "out"), file_format]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * nbytes + constant, int(done.stdout) >> 20
    out = tmp_path / "out"
    assert sum(p.stat().st_size for p in out.iterdir()) > count * nbytes
