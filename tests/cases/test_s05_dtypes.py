"""S05: every dtype that torch has comes back bit for bit, or is refused by name before anything is written."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from tests.ranks import run_ranks

ALL = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
STORED = {name: dtype for name, dtype in ALL.items() if name not in QUANTIZED}
NAMED = {  # by the case
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}


def raw_bytes(name: str, times: int = 1) -> bytearray:
    """24 random bytes (48 for the one dtype that 24 do not divide into), NaN payloads and all; 0 and 1 for bool."""
    numbers = random.Random(name)
    data = bytearray(numbers.randbytes(48 if ALL[name].itemsize == 16 else 24))
    if name == "bool":
        data = bytearray(byte & 1 for byte in data)
    if name == "float32":
        data[:8] = b"\x01\x00\xa0\x7f\x55\xaa\xff\xff"  # a signalling NaN and a quiet one, with payloads
    return data * times


def tensor_of(name: str, times: int = 1) -> torch.Tensor:
    return torch.frombuffer(raw_bytes(name, times), dtype=torch.uint8).view(STORED[name])


def blank(name: str, times: int = 1) -> torch.Tensor:
    return torch.zeros(len(raw_bytes(name, times)), dtype=torch.uint8).view(STORED[name])


def memory(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor, whatever operations its dtype has."""
    assert tensor.is_contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def in_rows(flat: torch.Tensor, rows: int = 2) -> torch.Tensor:
    return flat.view(rows, -1)


def test_s05_the_list_is_all_of_torch() -> None:
    """What the report names is here, and nothing that torch has is left out."""
    assert set(STORED) >= NAMED
    assert set(ALL) == set(STORED) | QUANTIZED


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_s05_every_dtype_round_trips(tmp_path: Path, encode: str) -> None:
    """Loaded in place, into strided memory, and read without a template: dtype and bytes are the saved ones."""
    state = {
        "small": {name: tensor_of(name) for name in STORED},
        "long": {name: tensor_of(name, 512) for name in STORED},  # gets smaller, so it is truly encoded
        "turned": {name: in_rows(tensor_of(name, 2)).t() for name in STORED},
    }
    ckpt.save(tmp_path / "run", 1, state, encode=encode, wait=True)
    target = {
        "small": {name: blank(name) for name in STORED},
        "long": {name: blank(name, 512) for name in STORED},
        "turned": {name: in_rows(blank(name, 2)).t() for name in STORED},
    }
    held = {name: dict(tensors) for name, tensors in target.items()}
    ckpt.load(tmp_path / "run", target)
    found = ckpt.read(tmp_path / "run")
    for name, dtype in STORED.items():
        for part, tensors in held.items():
            assert target[part][name] is tensors[name], (part, name)
            assert found[part][name].dtype == target[part][name].dtype == dtype
        for loaded in (target, found):
            assert memory(loaded["small"][name]) == raw_bytes(name), name
            assert memory(loaded["long"][name]) == raw_bytes(name, 512), name
        assert memory(target["turned"][name].t()) == raw_bytes(name, 2), name
        assert found["turned"][name].shape == state["turned"][name].shape
    nbytes = sum(file.stat().st_size for file in (tmp_path / "run").glob("step-*/state-*"))
    total = sum(len(raw_bytes(name)) * 515 for name in STORED)
    assert nbytes < total / 10 if encode == "zstd" else nbytes > total


def save_sharded(rank: int, world: int, run: str) -> None:
    """Cut over two ranks by rows and by columns, raw and encoded."""
    mesh = init_device_mesh("cpu", (world,))

    def cut(name: str, dim: int) -> DTensor:
        whole = in_rows(tensor_of(name, 2))
        local = whole.chunk(world, dim)[rank]  # of 3 columns: 2 and 1
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())

    state = {dim: {name: cut(name, i) for name in STORED} for i, dim in enumerate(("rows", "columns"))}
    for encode in ("raw", "zstd"):
        ckpt.save(f"{run}-{encode}", 1, state, encode=encode, wait=True)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Encoding -> a run saved at W=2."""
    run = tmp_path_factory.mktemp("s05") / "run"
    run_ranks(2, save_sharded, str(run))
    return {encode: run.with_name(f"run-{encode}") for encode in ("raw", "zstd")}


def test_s05_every_dtype_reshards_two_to_one(sharded) -> None:
    """Both cuts make up the whole tensors again."""
    for run in sharded.values():
        target = {dim: {name: in_rows(blank(name, 2)) for name in STORED} for dim in ("rows", "columns")}
        ckpt.load(run, target)
        for tensors in target.values():
            for name, tensor in tensors.items():
                assert tensor.dtype == STORED[name]
                assert memory(tensor) == raw_bytes(name, 2), name
        assert ckpt.verify(run).ok


def test_s05_every_dtype_is_exported(sharded, tmp_path: Path) -> None:
    """``ckpt restore`` of both encodings, and to both formats, holds the same bytes, as other readers see them."""
    wanted = {"raw-safetensors": "raw", "zstd-safetensors": "zstd", "zstd-torch": "zstd"}
    started = {}
    for name, encode in wanted.items():
        command = ["restore", sharded[encode], tmp_path / name, "--format", name.partition("-")[2]]
        started[name] = subprocess.Popen(
            [sys.executable, "-m", "ckpt.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for name, process in started.items():
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, (name, output)
    for name in ("raw-safetensors", "zstd-safetensors"):
        check_safetensors(tmp_path / name / "state.safetensors")
    found = torch.load(tmp_path / "zstd-torch" / "step-1.pt", weights_only=True)
    assert found.keys() == {"rows", "columns"}
    for tensors in found.values():
        assert tensors.keys() == STORED.keys()
        for name, tensor in tensors.items():
            assert memory(tensor) == raw_bytes(name, 2), name
            if tensor.dtype != STORED[name]:  # torch.save knows none of less than a byte: their bytes
                assert tensor.dtype == torch.uint8
                assert name[-1] in "1234567"


def check_safetensors(path: Path) -> None:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    as_bytes = json.loads(header["__metadata__"]["ckpt.stored_as_bytes"])
    with safe_open(path, "pt") as opened:
        assert len(opened.keys()) == 2 * len(STORED)
        for key in opened.keys():  # noqa: SIM118 - no dict
            name = key.partition(".")[2]
            begin, end = header[key]["data_offsets"]
            assert raw[start + begin : start + end] == raw_bytes(name, 2), key
            tensor = opened.get_tensor(key)
            assert memory(tensor) == raw_bytes(name, 2), key
            if key in as_bytes:
                shape = list(in_rows(tensor_of(name, 2)).shape)
                assert as_bytes[key] == f"{name} {shape}"
            else:
                assert tensor.dtype == STORED[name]


def quantized() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.linspace(0, 1, 24)
        return {
            name: torch.quantize_per_tensor(x, 0.1, 0, ALL[name])
            if name in {"qint8", "quint8", "qint32"}
            else torch.quantize_per_channel(x.view(2, 12), torch.ones(2), torch.zeros(2), 0, ALL[name])
            for name in sorted(QUANTIZED)
        }


def test_s05_what_is_refused_is_refused_before_a_byte(tmp_path: Path) -> None:
    """A quantized tensor among good ones: the message names it and its dtype, and no step is there."""
    for name, tensor in quantized().items():
        run = tmp_path / name
        with pytest.raises(ckpt.UnsupportedValueError) as caught:
            ckpt.save(run, 1, {"good": torch.ones(3), "layer": {"scale": tensor}}, wait=True)
        assert "layer.scale" in str(caught.value)
        assert name in str(caught.value)
        assert not list(run.rglob("step-*"))


@pytest.mark.parametrize("name", ["uint4", "bits8", "float4_e2m1fn_x2"])
def test_s05_a_dtype_that_cannot_be_converted_is_a_mismatch(tmp_path: Path, name: str) -> None:
    """With ``cast`` as without: found before anything is filled, and named with both dtypes."""
    run = tmp_path / "run"
    ckpt.save(run, 1, {"good": torch.ones(3), "scale": tensor_of(name)}, wait=True)
    target = {"good": torch.zeros(3), "scale": torch.zeros(24)}
    for cast in (False, True):
        with pytest.raises(ckpt.MismatchError, match=rf"scale: {name} \(24,\) in the step, float32 \(24,\)"):
            ckpt.load(run, target, cast=cast)
    assert torch.equal(target["good"], torch.zeros(3))
    report = ckpt.load(run, target, cast=True, strict=False)
    assert torch.equal(target["good"], torch.ones(3))
    assert [text.partition(":")[0] for text in report.mismatched] == ["scale"]
