"""S02: views of all kinds are stored as what they show, no more, and never refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckpt


def base() -> torch.Tensor:
    return torch.arange(1e6)


def views() -> dict[str, torch.Tensor]:
    b = base()
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return {
        "slice": b[:10],
        "column": b.view(1000, 1000)[:, 3],
        "transposed": torch.randn(4, 6).t(),
        "channels_last": image,
        "expanded": torch.tensor([1.0]).expand(5),
        "overlap_0": b[0:100],
        "overlap_1": b[50:150],
        "windows": b[:12].unfold(0, 5, 2),  # (4, 5), rows that share elements
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    }


def total_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_s02_views_are_stored_without_their_base(tmp_path: Path, encode: str) -> None:
    """Each is equal when read, and the whole run is under 64 KiB beside a base of 4 MB."""
    state = views()
    assert not state["transposed"].is_contiguous()
    assert not state["column"].is_contiguous()
    assert state["negated"].is_neg()
    ckpt.save(tmp_path / "run", 1, state, encode=encode, wait=True)
    assert total_nbytes(tmp_path / "run") < 64 << 10
    found = ckpt.read(tmp_path / "run")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_s02_loaded_overlaps_are_apart(tmp_path: Path) -> None:
    """Two views that shared memory when saved share none when read."""
    state = views()
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    found = ckpt.read(tmp_path / "run")
    found["overlap_0"].fill_(-1)
    assert torch.equal(found["overlap_1"], state["overlap_1"])


def test_s02_a_target_of_views_is_filled_where_they_show(tmp_path: Path) -> None:
    """In place where the view can be written, its base untouched elsewhere; a new tensor where it cannot."""
    saved = views()
    ckpt.save(tmp_path / "run", 1, saved, wait=True)
    b = torch.full((1_000_000,), -5.0)
    row = torch.full((4, 6), -5.0)
    target = {
        "slice": b[:10],
        "column": b.view(1000, 1000)[:, 3],
        "transposed": row.t(),
        "channels_last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([9.0]).expand(5),
        "conjugated": torch.zeros(3, dtype=torch.complex64).conj(),
    }
    held = dict(target)
    ckpt.load(tmp_path / "run", target)
    for name, tensor in target.items():
        assert torch.equal(tensor, saved[name]), name
    for name in ("slice", "column", "transposed", "channels_last"):
        assert target[name] is held[name], name
    assert torch.equal(row, saved["transposed"].t())
    assert (b != -5).sum() == 10 + 1000 - 1  # element 3 is in both
    assert torch.equal(held["expanded"], torch.full((5,), 9.0))  # not written through its one element


def test_s02_a_target_whose_rows_overlap_is_replaced(tmp_path: Path) -> None:
    """Numbers of their own do not fit into shared elements: the target gets a tensor that holds them all."""
    saved = torch.arange(20.0).view(4, 5)
    ckpt.save(tmp_path / "run", 1, {"model": Buffers(saved, saved + 1), "t": saved}, wait=True)
    windows = torch.zeros(12).unfold(0, 5, 2)
    b = torch.zeros(30)
    state = {"model": Buffers(b[:12].unfold(0, 5, 2), b[12:24].unfold(0, 5, 2)), "t": windows}
    ckpt.load(tmp_path / "run", state)
    assert torch.equal(state["t"], saved)
    assert torch.equal(state["model"].one, saved)
    assert torch.equal(state["model"].two, saved + 1)


class Buffers(nn.Module):
    """Two buffers, which may overlap."""

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("one", one)
        self.register_buffer("two", two)


def test_s02_overlapping_buffers_of_a_module(tmp_path: Path) -> None:
    """They are two tensors, not tied ones: both come back, into a model whose buffers overlap and one whose do not."""
    b = base()
    ckpt.save(tmp_path / "run", 1, {"model": Buffers(b[0:100], b[50:150])}, wait=True)
    assert total_nbytes(tmp_path / "run") < 64 << 10
    other = torch.zeros(150)
    for model in (Buffers(other[0:100], other[50:150]), Buffers(torch.zeros(100), torch.zeros(100))):
        ckpt.load(tmp_path / "run", {"model": model})
        assert torch.equal(model.one, b[0:100])
        assert torch.equal(model.two, b[50:150])


def test_s02_numpy_views(tmp_path: Path) -> None:
    """Strided, reversed, transposed and broadcast arrays, saved and filled."""
    a = np.arange(100_000.0)
    grid = np.arange(24, dtype=np.int16).reshape(4, 6)
    state = {
        "strided": a[::10_000],
        "reversed": a[9::-1],
        "transposed": grid.T,
        "broadcast": np.broadcast_to(np.float32(2), (3,)),
    }
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    assert total_nbytes(tmp_path / "run") < 64 << 10
    target = {"strided": np.zeros(100)[::10], "reversed": np.zeros(10)[::-1]}
    target |= {"transposed": np.zeros((4, 6), np.int16).T, "broadcast": np.broadcast_to(np.float32(0), (3,))}
    ckpt.load(tmp_path / "run", target)
    found = ckpt.read(tmp_path / "run")
    for name, array in state.items():
        for other in (found[name], target[name]):
            assert other.dtype == array.dtype
            assert np.array_equal(other, array), name
