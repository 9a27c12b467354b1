"""A small run of three steps, and the command line called in this process."""

from __future__ import annotations

import pytest

from ckpt.cli import main
from ckpt.format.values import ModuleNode, TensorRef
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, RankOwn, write_step
from tests.keeper.conftest import folder, trainers, url  # noqa: F401 - fixtures for real keepers


def write(opened, step):
    """One more step of two ranks."""
    tensors = [
        HandTensor("model.w", "float32", (64, 32), bytes([step % 256]) * 8192, "model", (2,), ("S0",)),
        HandTensor("model.b", "bfloat16", (7,), bytes(14), "model"),
    ]
    own = [RankOwn({"seed": rank}, (HandTensor("rng", "uint8", (9,), bytes(9)),)) for rank in range(2)]
    values = {"model": ModuleNode("model", {}), "epoch": step, "x": [TensorRef("model.b")]}
    return write_step(opened, step, tensors, world=2, values=values, own=own)


@pytest.fixture
def run(tmp_path):
    opened = Run.open(tmp_path / "run")
    for step in (100, 200, 300):
        write(opened, step)
    return opened


def ckpt(capsys, *words):
    """(exit code, stdout, stderr) of one command in this process."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err
