"""S27: learning rates and loss scales go on exactly where they were, whichever step is resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import ckpt
from tests.cases.cutting import cut_after

TOTAL = 20


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def sequential(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
    warmup = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    return schedulers.SequentialLR(optimizer, [warmup, schedulers.CosineAnnealingLR(optimizer, 15)], milestones=[5])


SCHEDULES = {
    "multistep": lambda optimizer: schedulers.MultiStepLR(optimizer, [4]),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 20),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": sequential,
    "onecycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=TOTAL + 1),
}


def job() -> dict[str, Any]:
    """One model, optimizer and schedule of every kind."""
    torch.manual_seed(0)
    models = nn.ModuleDict({name: nn.Linear(2, 1) for name in SCHEDULES})
    optimizers = {name: optimizer_of(models[name]) for name in SCHEDULES}
    made = {name: SCHEDULES[name](optimizer) for name, optimizer in optimizers.items()}
    return {"model": models, "optimizers": optimizers, "schedules": made}


def train(run: Path, every: int | None) -> tuple[int | None, list[dict[str, Any]]]:
    """The step that was restored, and of each step after it the rates and momenta that it trained with."""
    state, log = job(), []
    with ckpt.Checkpointer(run, state, every=ckpt.every(steps=every) if every else None) as checkpointer:
        for _ in checkpointer.steps(total=TOTAL):
            now = {}
            for name, optimizer in state["optimizers"].items():
                (group,) = optimizer.param_groups
                now[name] = (group["lr"], group["momentum"], state["schedules"][name].get_last_lr())
                state["model"][name](torch.ones(3, 2)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                state["schedules"][name].step()
            log.append(now)
    return checkpointer.restored_step, log


def test_s27_learning_rates_go_on_from_any_step(tmp_path: Path) -> None:
    """Five kinds of schedule, resumed after each of 19 steps: every later rate is exactly the uninterrupted one."""
    run = tmp_path / "run"
    restored, expected = train(run, every=1)
    assert restored is None
    assert ckpt.steps(run) == list(range(1, TOTAL + 1))
    for name in SCHEDULES:
        assert len({now[name][0] for now in expected}) > 1, name
    assert len({now["onecycle"][1] for now in expected}) > 5
    for step in range(1, TOTAL):
        restored, found = train(cut_after(run, step, tmp_path / str(step)), every=None)
        assert restored == step
        assert found == expected[step:], f"resumed after step {step}"


def scaled(run: Path, every: int | None) -> tuple[int | None, list[tuple[float, int, bool]]]:
    """Steps with a gradient scaler, the second of which overflows: scale, growth counter, whether it was skipped."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    state, log = {"model": model, "optimizer": optimizer, "scaler": scaler}, []
    with ckpt.Checkpointer(run, state, every=ckpt.every(steps=every) if every else None) as checkpointer:
        for step in checkpointer.steps(total=TOTAL):
            before = model.weight.detach().clone()
            scaler.scale(model(torch.ones(3, 2)).square().mean()).backward()
            if step == 2:
                model.weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log.append((scaler.get_scale(), scaler._growth_tracker.item(), torch.equal(before, model.weight)))
    return checkpointer.restored_step, log


def test_s27_the_loss_scale_goes_on_from_any_step(tmp_path: Path) -> None:
    """An overflow in step 2, resumed after step 5 and after each other: scale and growth counter are the same."""
    run = tmp_path / "run"
    restored, expected = scaled(run, every=1)
    assert restored is None
    assert expected[:5] == [
        (2.0**16, 1, False),
        (2.0**15, 0, True),
        (2.0**15, 1, False),
        (2.0**15, 2, False),
        (2.0**16, 0, False),
    ]
    for step in range(1, TOTAL):
        restored, found = scaled(cut_after(run, step, tmp_path / str(step)), every=None)
        assert restored == step
        assert found == expected[step:], f"resumed after step {step}"
