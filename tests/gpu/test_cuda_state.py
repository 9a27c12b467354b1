"""The same promises with the state on a CUDA device. Skipped, and so untested, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model on the device after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_device_state_round_trips(tmp_path: Path) -> None:
    """Parameters and moments come back to the device bit for bit; CUDA's generator goes on where it was."""
    model, optimizer = trained()
    ckpt.save(tmp_path / "run", 3, {"model": model, "optimizer": optimizer, "rng": ckpt.RNG()}, wait=True)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(9)
    other = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 5)).cuda()
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    ckpt.load(tmp_path / "run", {"model": other, "optimizer": fresh, "rng": ckpt.RNG()})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert theirs.is_cuda
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, fresh.state[theirs][key]), key
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_what_runs_on_the_device_after_save_does_not_reach_the_step(tmp_path: Path) -> None:
    """The copies run on a side stream behind the work queued before, and in front of what comes after."""
    tensor = torch.zeros(16 << 20, device="cuda")
    for _ in range(20):
        tensor += 1
    pending = ckpt.save(tmp_path / "run", 1, {"t": tensor})
    tensor.fill_(-1)
    pending.result()
    found = ckpt.read(tmp_path / "run")["t"]
    assert found.min() == 20
    assert found.max() == 20


def test_strided_device_tensors(tmp_path: Path) -> None:
    """Views that are not contiguous are saved by what they show."""
    base = torch.arange(24, device="cuda").view(4, 6)
    state = {"t": base.t(), "col": base[:, 2], "half": torch.randn(5, 5, device="cuda", dtype=torch.bfloat16).t()}
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    found = ckpt.read(tmp_path / "run")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.cpu())
