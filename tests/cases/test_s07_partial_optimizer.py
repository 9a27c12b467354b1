"""S07: an optimizer that has state for some parameters only, frozen ones and left-over gradients among them."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.distributed.models import whole
from tests.ranks import run_ranks

FIRST = ("0.weight", "0.bias")
KINDS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model, KINDS[kind](model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step on a fixed batch, from clean gradients; the gradients stay."""
    optimizer.zero_grad()
    model(torch.randn(4, 2, generator=torch.Generator().manual_seed(number))).square().sum().backward()
    optimizer.step()


def step_first_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Only layer 0 gets gradients, and so state; then it is frozen, its gradients left over."""
    model[1].requires_grad_(requires_grad=False)
    step(model, optimizer, 0)
    model[1].requires_grad_(requires_grad=True)
    model[0].requires_grad_(requires_grad=False)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter name -> what the optimizer holds for it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: {key: whole(value).clone() for key, value in s.items()} for p, s in optimizer.state.items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys(), name
        for key, tensor in state.items():
            assert torch.equal(found[name][key], tensor), (name, key)


@pytest.mark.parametrize("kind", KINDS)
def test_s07_exactly_the_saved_state_returns(tmp_path: Path, kind: str) -> None:
    """Whatever is frozen and whatever gradients or state the target has: layer 0 only, and the next steps are equal."""
    model, optimizer = build(kind, 0)
    step_first_layer(model, optimizer)
    assert model[0].weight.grad is not None
    ckpt.save(tmp_path / "run", 1, {"model": model, "optimizer": optimizer}, wait=True)
    expected = copy.deepcopy(held(model, optimizer))
    assert set(expected) == (set() if kind == "sgd" else set(FIRST))
    model.requires_grad_(requires_grad=True)
    after = []
    for number in (1, 2):
        step(model, optimizer, number)
        after.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    for frozen, stepped in itertools.product((0, 1, None), (False, True)):
        other, fresh = build(kind, 9)
        if stepped:  # has gradients, and state that the saved one has not
            step(other, fresh, 3)
        if frozen is not None:
            other[frozen].requires_grad_(requires_grad=False)
        gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in other.named_parameters()}
        report = ckpt.load(tmp_path / "run", {"model": other, "optimizer": fresh})
        assert report.missing == report.unexpected == report.mismatched == ()
        assert_equal(held(other, fresh), expected)
        for name, parameter in other.named_parameters():
            assert parameter.requires_grad == (frozen is None or not name.startswith(str(frozen)))
            before = gradients[name]
            assert parameter.grad is None if before is None else torch.equal(parameter.grad, before)
        other.requires_grad_(requires_grad=True)
        for number, numbers in zip((1, 2), after, strict=True):
            step(other, fresh, number)
            for name, tensor in other.state_dict().items():
                assert torch.equal(tensor, numbers[name]), (frozen, stepped, number, name)


def test_s07_gradients_change_nothing_of_a_save(tmp_path: Path) -> None:
    """With them, without them, frozen or not: the step holds the same tensors."""
    model, optimizer = build("adamw", 0)
    step_first_layer(model, optimizer)
    run = tmp_path / "run"
    ckpt.save(run, 1, {"model": model, "optimizer": optimizer}, wait=True)
    optimizer.zero_grad()
    ckpt.save(run, 2, {"model": model, "optimizer": optimizer}, wait=True)
    model.requires_grad_(requires_grad=True)
    ckpt.save(run, 3, {"model": model, "optimizer": optimizer}, wait=True)
    first, *others = (ckpt.read(run, step=number)["optimizer"] for number in (1, 2, 3))
    assert sorted(first["state"]) == ["model.0.bias", "model.0.weight"]
    for other in others:
        assert other["param_groups"] == first["param_groups"]
        assert_equal(other["state"], first["state"])


def sharded(rank: int, world: int, run: str, kind: str) -> tuple[dict, dict]:
    """The same on shards: save, load into a model with state everywhere; what was held and what is."""

    def build_sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = build(kind, seed)
        for layer in (*model, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
        return model, KINDS[kind](model.parameters())

    model, optimizer = build_sharded(0)
    step_first_layer(model, optimizer)
    ckpt.save(run, 1, {"model": model, "optimizer": optimizer}, wait=True)
    other, fresh = build_sharded(9)
    step(other, fresh, 3)
    ckpt.load(run, {"model": other, "optimizer": fresh})
    return held(model, optimizer), held(other, fresh)


def test_s07_partial_state_of_shards(tmp_path: Path) -> None:
    """FSDP at W=2, loaded at W=2 and W=1: state for layer 0 and nothing else."""
    for before, after in run_ranks(2, sharded, str(tmp_path / "run"), "adamw"):
        assert set(before) == set(FIRST)
        assert_equal(after, before)
    model, optimizer = build("adamw", 9)
    step(model, optimizer, 3)
    ckpt.load(tmp_path / "run", {"model": model, "optimizer": optimizer})
    assert_equal(held(model, optimizer), before)
