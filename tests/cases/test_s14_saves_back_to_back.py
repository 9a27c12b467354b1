"""S14: saves back to back, with the training's own collectives in between, whatever order each rank comes in."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.testing import store_env
from tests.ranks import run_ranks

SAVES = 20
LIMIT_S = 60.0


def save_often(rank: int, world: int, run: str) -> tuple[float, list[str]]:
    """Twenty saves without waiting, each followed by two collectives of the training and a pause of its own."""
    pauses = random.Random(rank)
    local = torch.zeros(1 << 16)
    state = {"w": DTensor.from_local(local, init_device_mesh("cpu", (world,)), [Shard(0)])}
    started, pendings = time.monotonic(), []
    for step in range(1, SAVES + 1):
        local.fill_(10 * step + rank)
        pendings.append(ckpt.save(run, step, state))
        dist.barrier()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
        time.sleep(pauses.uniform(0.0, 0.02))
    order = [pending.result(LIMIT_S).attempt for pending in pendings]
    assert ckpt.load(run, state).step == SAVES
    assert local.eq(10 * SAVES + rank).all()
    return time.monotonic() - started, order


def test_s14_twenty_saves_with_collectives_between_them(tmp_path: Path) -> None:
    """Nothing crosses; all are committed, in the order of the calls, each of one save throughout."""
    run = str(tmp_path / "run")
    for took_s, order in run_ranks(2, save_often, run):
        assert took_s < LIMIT_S
        assert order == [f"w1.{number}" for number in range(1, SAVES + 1)]
    assert ckpt.steps(run) == list(range(1, SAVES + 1))
    for step in range(1, SAVES + 1):
        assert ckpt.verify(run, step=step).ok
        shares = ckpt.read(run, step=step)["w"].reshape(2, -1)
        assert [share.unique().tolist() for share in shares] == [[10.0 * step], [10.0 * step + 1]]


def load_while_saving(rank: int, world: int, run: str) -> list[int]:
    """Load while the newest save is still being written: by number, and the latest."""
    local = torch.full((1 << 16,), 10.0 + rank)
    state = {"w": DTensor.from_local(local, init_device_mesh("cpu", (world,)), [Shard(0)])}
    ckpt.save(run, 1, state).result(LIMIT_S)
    found = []
    for step, wanted in ((2, "latest"), (3, 3), (4, 1)):
        local.fill_(10 * step + rank)
        pending = ckpt.save(run, step, state)
        assert not pending.committed
        local.fill_(-1)
        found.append(ckpt.load(run, state, step=wanted).step)
        assert local.eq(10 * found[-1] + rank).all()
        total = torch.ones(1)
        dist.all_reduce(total)
        pending.result(LIMIT_S)
    return found


def test_s14_a_load_waits_for_a_save_under_way(tmp_path: Path) -> None:
    """What is loaded is a whole step: the one that was being written, once it is there."""
    slow = store_env({"wrap": "slow", "program": "keeper", "delay_s": 0.5, "match": "COMMIT", "operation": "create"})
    assert run_ranks(2, load_while_saving, str(tmp_path / "run"), env=slow) == [[2, 3, 1]] * 2
