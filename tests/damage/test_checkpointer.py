"""A job that starts again on a damaged run: what it goes on from, and what it says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.cli import main


def state() -> dict[str, Any]:
    return {"w": torch.zeros(5000), "b": torch.zeros(3)}


def damage(root: Path) -> Path:
    """Flip a bit of the newest step's tensors."""
    (path,) = root.glob("step-00000002-*/state-*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return path


def test_it_says_what_it_repaired(tmp_path: Path, capsys: Any) -> None:
    """From a tier: the newest step, and a line on stderr; ``restore`` and ``read`` of the step stay refused without."""
    run, tier = tmp_path / "run", tmp_path / "tier"
    saved = {"w": torch.arange(5000.0), "b": torch.ones(3)}
    for step in (1, 2):
        ckpt.save(run, step, {name: tensor * step for name, tensor in saved.items()}, wait=True)
    shutil.copytree(run, tier)
    path = damage(run)
    held = state()
    with ckpt.Checkpointer(run, held, tiers=[tier]) as checkpointer:
        assert checkpointer.restored_step == 2
        assert checkpointer.load_report is not None
        (text,) = checkpointer.load_report.repaired
    assert torch.equal(held["w"], saved["w"] * 2)
    assert text.startswith(f"{path.relative_to(run)}: ")
    assert text.endswith(f": from {tier}")
    assert f"ckpt: repaired while reading (`ckpt repair` mends the file): {text}" in capsys.readouterr().err
    assert torch.equal(ckpt.read(run, step=2, tiers=[tier])["w"], saved["w"] * 2)
    assert text in capsys.readouterr().err
    assert main(["restore", str(run), str(tmp_path / "out"), "--step", "2"]) == 4
    again = state()
    with ckpt.Checkpointer(run, again) as checkpointer:
        assert checkpointer.restored_step == 1
    assert torch.equal(again["w"], saved["w"])


def test_restore_takes_parity(tmp_path: Path) -> None:
    """What reads a step without a template has the same sources."""
    run = tmp_path / "run"
    for step in (1, 2):
        ckpt.save(run, step, {"w": torch.arange(5000.0) * step, "b": torch.ones(3)}, parity=1, wait=True)
    damage(run)
    assert main(["restore", str(run), str(tmp_path / "out")]) == 0
    assert torch.equal(ckpt.read(run)["w"], torch.arange(5000.0) * 2)
