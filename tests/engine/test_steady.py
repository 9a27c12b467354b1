"""Saves of a structure that is that of the save before: what ranks still say to each other, and what they notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.engine import session
from ckpt.engine.board import Board
from ckpt.engine.group import Group
from tests.distributed.models import build, train
from tests.ranks import run_ranks

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
OWN_COLLECTIVES = ("start_all_reduce_max", "all_gather_bytes", "broadcast_bytes")
BOARD = ("read", "read_all", "write", "decide", "count")


def counting(called: Counter[str], owner: Any, name: str) -> Callable[..., Any]:
    """What goes by that name, counted."""
    call = getattr(owner, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        called[name] += 1
        return call(*arguments, **keywords)

    return counted


def count_collectives(rank: int, world: int, run: str) -> tuple[Counter[str], int]:
    """What the third save of one structure calls, and how many plans three saves made."""
    model, optimizer = build("fsdp", world)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    called: Counter[str] = Counter()
    plans = 0
    make_plan = session.make_plan

    def planned(*arguments: Any) -> Any:
        nonlocal plans
        plans += 1
        return make_plan(*arguments)

    session.make_plan = planned  # type: ignore[assignment]
    train(model, optimizer, rank, world, 1)
    for step in (1, 2):
        ckpt.save(run, step, {**state, "step": step})
    for owner, names in ((dist, COLLECTIVES), (Group, OWN_COLLECTIVES), (Board, BOARD)):
        for name in names:
            setattr(owner, name, counting(called, owner, name))
    pending = ckpt.save(run, 3, {**state, "step": 3})
    told = Counter(called)
    pending.result(60)
    return told, plans


def test_a_steady_save_costs_one_small_all_reduce(tmp_path: Path) -> None:
    """No planning, and nothing else between ranks, though values change."""
    for called, plans in run_ranks(2, count_collectives, str(tmp_path / "run")):
        assert called == {"start_all_reduce_max": 1}
        assert plans == 1


def change_on_one(rank: int, world: int, run: str) -> None:
    """Rank 1 has a module more for one save, a tensor of its own of another shape for the next."""
    stages = nn.ModuleDict({"first": nn.Linear(2, 2)})
    state: dict[str, Any] = {"w": stages, "own": ckpt.per_rank(torch.full((2,), float(rank)))}
    ckpt.save(run, 1, state).result(60)
    ckpt.save(run, 2, state).result(60)
    if rank == 1:
        stages["extra"] = nn.Linear(3, 3)
    ckpt.save(run, 3, state).result(60)
    if rank == 1:
        del stages["extra"]
    longer = {**state, "own": ckpt.per_rank(torch.full((5,), float(rank)))} if rank == 1 else state
    ckpt.save(run, 4, longer).result(60)
    ckpt.save(run, 5, state).result(60)
    dist.barrier()
    if rank == 0:
        for step in (2, 3, 4, 5):
            tree = ckpt.read(run, step=step)
            assert {key.partition(".")[0] for key in tree["w"]} == ({"first", "extra"} if step == 3 else {"first"})
            assert tree["own"][1].shape == ((5,) if step == 4 else (2,))
            assert ckpt.verify(run, step=step).ok


def test_a_structure_that_changes_on_one_rank_is_noticed_on_all(tmp_path: Path) -> None:
    """Each save is what each rank had then."""
    run_ranks(2, change_on_one, str(tmp_path / "run"))


def in_place(rank: int, world: int, run: str) -> None:
    """The same objects with other shapes, dtypes and values: nothing is taken over from the save before."""
    w = torch.ones(4)
    state = {"w": w, "seen": 1}
    ckpt.save(run, 1, state).result(60)
    w.resize_(2, 3).fill_(7)
    ckpt.save(run, 2, state).result(60)
    w.data = torch.arange(6, dtype=torch.float64)
    ckpt.save(run, 3, state).result(60)
    state["w"] = torch.arange(6, dtype=torch.float64) + 1
    ckpt.save(run, 4, state).result(60)
    dist.barrier()
    assert torch.equal(ckpt.read(run, step=1)["w"], torch.ones(4))
    assert torch.equal(ckpt.read(run, step=2)["w"], torch.full((2, 3), 7.0))
    assert torch.equal(ckpt.read(run, step=3)["w"], torch.arange(6, dtype=torch.float64))
    assert torch.equal(ckpt.read(run, step=4)["w"], torch.arange(6, dtype=torch.float64) + 1)


def test_a_tensor_changed_in_place_is_looked_at_anew(tmp_path: Path) -> None:
    """Its shape, its dtype, its memory."""
    run_ranks(2, in_place, str(tmp_path / "run"))


def test_optimizer_state_that_is_replaced_is_looked_at_anew(tmp_path: Path) -> None:
    """A moment that is another tensor, of another dtype, no tensor, new, gone: each save has what was there then."""
    run = str(tmp_path / "run")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    step = 0

    def save() -> dict[str, Any]:
        nonlocal step
        step += 1
        ckpt.save(run, step, {"model": model, "optimizer": optimizer}).result(60)
        found: dict[str, Any] = ckpt.read(run, step=step)["optimizer"]["state"]["model.weight"]
        return found

    def check() -> None:
        found = save()
        assert set(found) == set(state)
        for key, value in state.items():
            same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
            assert same, key
            assert type(found[key]) is type(value)
            assert getattr(found[key], "dtype", None) == getattr(value, "dtype", None)

    check()
    check()
    state["exp_avg"] = torch.full((4, 4), 5.0)
    check()
    state["exp_avg"].mul_(2)
    check()
    state["exp_avg"] = state["exp_avg"].bfloat16()
    check()
    state["exp_avg_sq"] = 7
    check()
    state["exp_avg_sq"] = torch.ones(2)
    check()
    state["more"] = torch.arange(3)
    check()
    del state["more"]
    check()
    state["exp_avg_sq"] = torch.ones(4, 4).t().contiguous().t()
    check()


def disagree(rank: int, world: int, run: str) -> list[str]:
    """What each rank is told when they differ in a save that is not the first; the last one works."""
    state: dict[str, Any] = {"w": torch.ones(4), "seen": 1}
    ckpt.save(run, 1, state).result(60)
    told = []
    for step, other in (
        (2, {**state, "seen": 1 + rank}),
        (2 + rank, state),
        (2, {**state, "odd": [0, lambda: 0][rank]}),
    ):
        with pytest.raises(ckpt.CkptError) as caught:
            ckpt.save(run, step, other)
        told.append(str(caught.value))
    ckpt.save(run, 2, state).result(60)
    assert ckpt.steps(run) == [1, 2]
    return told


def test_ranks_that_differ_are_told_at_once(tmp_path: Path) -> None:
    """A value, the step, and an error on one rank only, each named on both ranks."""
    first, second = run_ranks(2, disagree, str(tmp_path / "run"))
    assert first[0] == second[0]
    assert "state['seen']: rank 0 and rank 1 have different values" in first[0]
    assert first[1] == second[1] == "the ranks save different steps: [2, 3]"
    assert first[2].startswith("rank 1: UnsupportedValueError: state['odd']")
    assert second[2].startswith("state['odd']")
