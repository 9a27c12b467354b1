"""S13: save() has copied everything when it returns, however slow the storage behind it is."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.testing import store_env
from tests.ranks import run_ranks

HELD_S = 30.0


def held_storage(folder: Path) -> dict[str, str]:
    """No data file is begun before ``release`` is there; ``waiting`` tells that one wants to."""
    return store_env(
        {
            "wrap": "blocking",
            "program": "keeper",
            "operation": "open_sink",
            "release": folder / "release",
            "waiting": folder / "waiting",
        }
    )


def wait_until_held(folder: Path) -> None:
    deadline = time.monotonic() + HELD_S
    while not (folder / "waiting").exists():
        assert time.monotonic() < deadline, "the keeper did not come to its first file"
        time.sleep(0.002)


def change_everything(rank: int, world: int, folder: Path, encode: str) -> Any:
    """Save onto storage that stands still, change all of the state, only then let the storage go on."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state: dict[str, Any] = {
        "w": torch.ones(1000),
        "step": torch.tensor(1.0),
        "np": np.ones(10),
        "lst": [1],
        "dict": {"a": {"b": 1}, "t": [torch.zeros(4)]},
        "own": ckpt.per_rank({"t": torch.zeros(2), "n": [0]}),
        "model": model,
        "optimizer": optimizer,
    }

    def train() -> None:
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    train()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    pending = ckpt.save(folder / "run", 1, state, encode=encode)
    wait_until_held(folder)
    held = not pending.done and ckpt.latest(folder / "run") is None
    tensors = state["dict"]["t"]
    state["w"].fill_(2)
    state["step"].add_(1)
    state["np"][:] = 5
    state["lst"].append(2)
    state["dict"]["a"]["b"] = 2
    state["dict"]["new"] = 3
    tensors[0].fill_(7)
    tensors.clear()
    state["own"].value["t"].fill_(9)
    state["own"].value["n"][0] = 9
    train()
    del state["w"], state["model"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(11)
    (folder / "release").touch()
    pending.result(HELD_S)
    return held, before


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_s13_what_is_changed_after_save_is_not_in_it(tmp_path: Path, encode: str) -> None:
    """Tensors, arrays, lists, dicts, a model and its optimizer: the step has what they were when save() returned."""
    arguments = (tmp_path, encode)
    held, (model, moments) = run_ranks(
        1, change_everything, *arguments, env=held_storage(tmp_path), process_group=False
    )[0]
    assert held
    found = ckpt.read(tmp_path / "run")
    assert torch.equal(found["w"], torch.ones(1000))
    assert torch.equal(found["step"], torch.tensor(1.0))
    assert type(found["np"]) is np.ndarray
    assert found["np"].tolist() == [1.0] * 10
    assert found["lst"] == [1]
    assert sorted(found["dict"]) == ["a", "t"]
    assert found["dict"]["a"] == {"b": 1}
    assert torch.equal(found["dict"]["t"][0], torch.zeros(4))
    assert found["own"][0]["n"] == [0]
    assert torch.equal(found["own"][0]["t"], torch.zeros(2))
    assert found["model"].keys() == model.keys()
    for name, value in model.items():
        assert torch.equal(found["model"][name], value), name
    for name, values in zip(found["optimizer"]["param_groups"][0]["params"], moments.values(), strict=True):
        for key, value in values.items():
            assert torch.equal(found["optimizer"]["state"][name][key], value), (name, key)


def save_in_a_row(rank: int, world: int, folder: Path) -> Any:
    """Two saves while the storage stands still, then three more that reuse the memory of the first two."""
    state = {"w": torch.zeros(50_000), "np": np.zeros(7), "lst": [0], "t": torch.tensor(0)}
    pendings = []
    for step in range(1, 6):
        state["w"].fill_(step)
        state["np"][:] = step
        state["lst"][0] = step
        state["t"].add_(1)
        pendings.append(ckpt.save(folder / "run", step, state))
        if step == 2:
            wait_until_held(folder)
            held = not any(pending.done for pending in pendings)
            (folder / "release").touch()
    for value in (state["w"], state["t"], state["np"]):
        value[...] = -1
    return held, [pending.result(HELD_S).step for pending in pendings]


def test_s13_saves_that_reuse_memory_keep_their_own_values(tmp_path: Path) -> None:
    """Several saves in a row, the state changed in place between them: each step has its own values throughout."""
    outcome = run_ranks(1, save_in_a_row, tmp_path, env=held_storage(tmp_path), process_group=False)
    assert outcome == [(True, [1, 2, 3, 4, 5])]
    assert ckpt.steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        found = ckpt.read(tmp_path / "run", step=step)
        assert torch.equal(found["w"], torch.full((50_000,), float(step)))
        assert found["np"].tolist() == [float(step)] * 7
        assert (found["lst"], found["t"].item()) == ([step], step)
