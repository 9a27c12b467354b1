"""Saves whose copy goes on while training does: what comes back, who waits, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.snapshot import overlap
from tests.ranks import run_ranks

WIDTH = 256  # a weight of 256 KiB, large enough to be copied late, also when two ranks share it

Step = Callable[[torch.optim.Optimizer], None]


class Gate:
    """Lets the copying of late tensors begin only when it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self._copy_into = overlap.copy_into

    def __enter__(self) -> Self:
        def copy_into(*arguments: Any, **keywords: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            return self._copy_into(*arguments, **keywords)

        overlap.copy_into = copy_into
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        overlap.copy_into = self._copy_into


def make(world: int, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model, sharded when there are several ranks, with an AdamW that has made a step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    backward(model)
    optimizer.step()
    return model, optimizer, {"model": model, "optimizer": optimizer, "plain": torch.arange(40_000.0)}


def backward(model: nn.Module) -> None:
    """New gradients."""
    model.zero_grad()
    model(torch.randn(4, WIDTH)).square().sum().backward()


def parts(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A copy of all that this rank holds, by name."""
    found: dict[str, torch.Tensor] = {"plain": state["plain"].clone()}
    for name, parameter in state["model"].named_parameters():
        found[name] = local(parameter).clone()
        for key, value in state["optimizer"].state[parameter].items():
            found[f"{key}.{name}"] = local(value).clone()
    return found


def local(tensor: Any) -> torch.Tensor:
    """This rank's part, detached."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def steps_wait(rank: int, world: int, run: str, settings: dict[str, Any]) -> None:
    """Save, change what save() has copied, step while nothing late is copied yet; the step waits; all comes back."""
    model, optimizer, state = make(world, **settings)
    wanted = parts(state)
    backward(model)
    stepped = threading.Event()
    with Gate() as gate:
        pending = ckpt.save(run, 1, state, overlap=True)
        state["plain"].zero_()

        def step() -> None:
            optimizer.step()
            stepped.set()

        thread = threading.Thread(target=step)
        thread.start()
        assert gate.reached.wait(60)
        assert not stepped.wait(0.2), "the optimizer stepped over tensors that were not copied yet"
        assert not pending.staged
        stalled_s = pending.stall_s
        gate.opened.set()
        thread.join(60)
    assert stepped.is_set()
    assert pending.stall_s >= stalled_s + 0.1, "the wait in the step counts as stall"
    assert pending.result(60).stall_s == pending.stall_s
    changed = parts(state)
    assert not torch.equal(changed["0.weight"], wanted["0.weight"])
    ckpt.load(run, state)
    assert_same(parts(state), wanted)


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_the_next_step_waits_for_the_copy(world: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """And what was saved is what was there when save() was called."""
    run_ranks(world, steps_wait, str(tmp_path / "run"), settings)


def past_the_hooks(optimizer: torch.optim.Optimizer) -> None:
    """A step that torch's hooks do not see."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def by_hand(optimizer: torch.optim.Optimizer) -> None:
    """A change past autograd, as ``.data`` allows it."""
    local(optimizer.param_groups[0]["params"][2]).add_(1)


def changes(rank: int, world: int, run: str, settings: dict[str, Any], change: Step) -> list[str]:
    """What each rank is told of a save during which rank 0 (its optimizer's owner) changes what is being copied."""
    model, optimizer, state = make(world, **settings)
    backward(model)
    with Gate() as gate:
        pending = ckpt.save(run, 1, state, overlap=True)
        assert gate.reached.wait(60)
        change(optimizer)
        gate.opened.set()
        with pytest.raises(ckpt.CkptError) as caught:
            pending.result(60)
    assert ckpt.latest(run) is None
    wanted = parts(state)
    ckpt.save(run, 2, state, overlap=True).result(60)
    backward(model)
    optimizer.step()
    ckpt.load(run, state)
    assert_same(parts(state), wanted)
    return [str(caught.value)]


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_a_change_during_the_copy_fails_the_save_by_name(world: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Version counters do not move under fused steps, nor under FSDP2; the next save works."""
    for told in run_ranks(world, changes, str(tmp_path / "run"), settings, past_the_hooks):
        for name in ("model.0.weight", "model.1.weight", "optimizer.state.exp_avg.model.0.weight"):
            assert name in told[0]
        assert "changed while a save with overlap=True was still copying" in told[0]


@pytest.mark.parametrize("world", [1, 2])
def test_only_the_changed_tensor_is_named(world: int, tmp_path: Path) -> None:
    """One parameter, changed by hand."""
    for told in run_ranks(world, changes, str(tmp_path / "run"), {}, by_hand):
        assert "model.1.weight: changed while" in told[0]


def one_rank_changes(rank: int, world: int, run: str) -> str:
    """Only rank 1 changes something."""
    _, optimizer, state = make(world)
    with Gate() as gate:
        pending = ckpt.save(run, 1, state, overlap=True)
        assert gate.reached.wait(60)
        if rank == 1:
            by_hand(optimizer)
        gate.opened.set()
        with pytest.raises(ckpt.CkptError) as caught:
            pending.result(60)
    dist.barrier()
    return str(caught.value)


def test_all_ranks_are_told_whose_tensor_changed(tmp_path: Path) -> None:
    """The save fails on every rank."""
    for told in run_ranks(2, one_rank_changes, str(tmp_path / "run")):
        assert "rank 1" in told
        assert "model.1.weight" in told


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Copying of late tensors held up."""
    with Gate() as held:
        yield held


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Where to save to."""
    return str(tmp_path / "run")


def test_the_next_save_waits_for_the_copy(run: str, gate: Gate) -> None:
    """Two saves without a step in between."""
    _, _, state = make(1)
    first = ckpt.save(run, 1, state, overlap=True)
    second: list[ckpt.PendingSave] = []
    thread = threading.Thread(target=lambda: second.append(ckpt.save(run, 2, state, overlap=True)))
    assert gate.reached.wait(60)
    thread.start()
    assert not first.staged
    gate.opened.set()
    thread.join(60)
    assert first.result(60).step == 1
    assert second[0].result(60).step == 2
    assert ckpt.steps(run) == [1, 2]


def test_wait_copied_makes_changes_safe(run: str, gate: Gate) -> None:
    """For those who change parameters by other means than an optimizer."""
    _, optimizer, state = make(1)
    wanted = parts(state)
    pending = ckpt.save(run, 1, state, overlap=True)
    threading.Timer(0.05, gate.opened.set).start()
    pending.wait_copied()
    by_hand(optimizer)
    pending.result(60)
    ckpt.load(run, state)
    assert_same(parts(state), wanted)


def test_a_load_waits_for_the_copy(run: str, gate: Gate) -> None:
    """It would fill what is still read."""
    model, _, state = make(1)
    ckpt.save(run, 1, state).result(60)
    before = parts(state)
    with torch.no_grad():
        model[0].weight.add_(1)
    after = parts(state)
    ckpt.save(run, 2, state, overlap=True)
    threading.Timer(0.05, gate.opened.set).start()
    ckpt.load(run, state, step=1)
    assert_same(parts(state), before)
    ckpt.load(run, state, step=2)
    assert_same(parts(state), after)


def test_a_state_without_optimizer_is_copied_at_once(run: str, gate: Gate) -> None:
    """Nothing says when its tensors change."""
    weights = {"w": torch.ones(1 << 20)}
    pending = ckpt.save(run, 1, weights, overlap=True)
    weights["w"].zero_()
    pending.result(60)
    ckpt.load(run, weights)
    assert bool((weights["w"] == 1).all())
    assert not gate.reached.is_set()


def test_a_checkpointer_overlaps(run: str) -> None:
    """Every save of a loop, resumed bit for bit."""

    def train(total: int) -> list[torch.Tensor]:
        model, optimizer, state = make(1)
        seen = []
        with ckpt.Checkpointer(run, state, every=ckpt.every(steps=1), overlap=True) as checkpointer:
            for _ in checkpointer.steps(total=total):
                backward(model)
                optimizer.step()
                seen.append(model[0].weight.detach().clone())
        return seen

    first = train(3)
    assert len(first) == 3
    model, _, state = make(1)
    ckpt.load(run, {**state, "rng": ckpt.RNG()}, step=2)
    assert torch.equal(model[0].weight, first[1])
    assert len(train(5)) == 2


def test_steps_that_cannot_wait_are_refused(run: str) -> None:
    """Captured in a graph, or run in backward."""
    model, optimizer, state = make(1)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ckpt.BadInputError, match="AdamW that is capturable"):
        ckpt.save(run, 1, state, overlap=True)
    optimizer.param_groups[0]["capturable"] = False
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ckpt.BadInputError, match="hooks that run in backward"):
        ckpt.save(run, 1, state, overlap=True)
    handle.remove()
    assert ckpt.save(run, 1, state, overlap=True).result(60).step == 1
