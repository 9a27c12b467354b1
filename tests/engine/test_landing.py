"""Chunks of any cut into tensors that no read can fill, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.landing import TensorLanding
from ckpt.plan.boxes import Box
from ckpt.reading.parallel import fetch_all
from ckpt.reading.step import StepReader
from ckpt.run import Run
from ckpt.snapshot.copy import as_integers
from ckpt.state import dtype_of
from ckpt.testing.handmade import HandTensor, cut, filled, write_step
from tests.reading.boxes import some_boxes

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]
CUTS = [
    (1, None, (), (7, 5)),
    (3, (3,), ("S0",), (7, 5)),
    (3, (3,), ("S1",), (5, 7)),
    (4, (2, 2), ("S1", "S0"), (5, 7, 3)),
    (4, (2, 2), ("S0/2", "S0"), (9, 4)),
    (2, (2,), ("S0",), (1, 40)),
    (2, None, (), ()),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes, so that a small tensor has many of them, cut in the middle of rows."""
    for module in ("ckpt.format.chunk", "ckpt.reading.shards"):
        monkeypatch.setattr(f"{module}.CHUNK_NBYTES", 64)


def expected(whole: bytes, shape: tuple[int, ...], box: Box, dtype: str) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(cut(whole, shape, box, dtype)), dtype=torch.uint8)
    return raw.view(dtype_of(dtype)).view(box.sizes)


def strided(box: Box, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Of the box's shape, dimensions in reverse order in memory."""
    return torch.zeros(tuple(reversed(box.sizes)), dtype=dtype, device=device).permute(
        tuple(reversed(range(len(box.sizes))))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ["raw", "zstd"])
@pytest.mark.parametrize(("world", "mesh", "placements", "shape"), CUTS)
def test_any_box_of_any_cut(tmp_path, small_chunks, device, encoding, world, mesh, placements, shape):
    """The whole tensor and random boxes, into strided tensors and into wider dtypes."""
    run = Run.open(tmp_path / "run")
    data = {dtype: filled(shape, dtype) for dtype in ("int16", "bfloat16", "complex128")}
    tensors = [HandTensor(dtype, dtype, shape, data[dtype], "state", mesh, placements) for dtype in data]
    write_step(run, 1, tensors, world=world, encoding=encoding)
    reader = StepReader.open(run)
    choose = random.Random(0)
    for dtype, whole in data.items():
        for box in filter(lambda box: box.numel, some_boxes(shape, choose, 6)):
            same = strided(box, dtype_of(dtype), device)
            wider = strided(box, {"int16": torch.int64, "bfloat16": torch.float32}.get(dtype, same.dtype), device)
            into = as_integers(same)
            for landing in (TensorLanding(into, box, into.dtype), TensorLanding(wider, box, dtype_of(dtype))):
                fetch_all(reader, reader.fetches(dtype, box, landing))
                landing.wait()
            wanted = expected(whole, shape, box, dtype)
            assert torch.equal(as_integers(same.cpu()), as_integers(wanted)), box
            assert torch.equal(as_integers(wider.cpu()), as_integers(wanted.to(wider.dtype))), box


@pytest.mark.parametrize("device", DEVICES)
def test_more_chunks_than_buffers(tmp_path: Path, device: str) -> None:
    """Buffers that are used again do not lose what is still on its way: 18 chunks of 16 MiB."""
    torch.manual_seed(0)
    state = {"a": torch.randn(6001, 6001), "b": torch.randn(6001, 6001)}
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    target = {name: torch.zeros(6001, 6001, device=device).t() for name in state}
    ckpt.load(tmp_path / "run", target)
    for name, tensor in state.items():
        assert torch.equal(target[name].cpu(), tensor)
