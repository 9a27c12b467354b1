"""The command line on steps that the engine wrote, with real ranks."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

import ckpt
from tests.cli.conftest import ckpt as command
from tests.distributed.models import build, gathered, train
from tests.ranks import run_ranks


def save_twice(rank, world, run, kind):
    """One state as step 1, raw, and step 2, encoded; another one as step 3. Gives what rank 0 gathered of the first."""
    model, optimizer = build(kind, world)
    train(model, optimizer, rank, world, steps=2)
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RNG(), "epoch": 7}
    ckpt.save(run, 1, state).result()
    ckpt.save(run, 2, state, encode="zstd").result()
    whole = gathered(model, optimizer)
    train(model, optimizer, rank, world, steps=1)
    ckpt.save(run, 3, state).result()
    return whole if rank == 0 else None


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 3), ("ddp", 2)])
def test_verbs_on_saved_steps(tmp_path, capsys, kind, world):
    """verify finds nothing, raw and encoded steps are equal, and restore gives what the ranks had, in both formats."""
    import torch

    run = tmp_path / "run"
    expected = run_ranks(world, save_twice, str(run), kind)[0]
    code, out, _ = command(capsys, "verify", run, "--all", "--json")
    assert (code, [report["problems"] for report in json.loads(out)["reports"]]) == (0, [[], [], []])
    assert command(capsys, "diff", run, 1, 2)[0] == 0
    code, out, _ = command(capsys, "diff", run, 2, 3, "--json")
    changed = {change["name"] for change in json.loads(out)["tensors"]}
    assert code == 1
    trained = {name.partition("/")[0] for name in expected if "/" in name}  # not the buffer
    assert {name for name in changed if name.startswith("model.")} == {f"model.{name}" for name in trained}
    for step in (1, 2):
        out = tmp_path / f"out{step}"
        assert command(capsys, "restore", run, out, "--step", step)[0] == 0
        found = load_file(out / "model.safetensors")
        for name, tensor in load_file(out / "optimizer.safetensors").items():
            _, key, parameter = name.split(".", 2)
            found[f"{parameter.removeprefix('model.')}/{key}"] = tensor
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert command(capsys, "restore", run, tmp_path / "torch", "--step", 1, "--format", "torch")[0] == 0
    loaded = torch.load(tmp_path / "torch" / "step-1.pt", weights_only=True)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded["model"].items())
    assert (loaded["epoch"], len(loaded["rng"])) == (7, world)
