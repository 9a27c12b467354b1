"""S26: storage that is slower than the training group's time-out, and a rank that dies while others save."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.keeper.client import KeeperClient
from ckpt.testing import store_env
from tests.ranks import run_ranks

GROUP_TIMEOUT_S = 5.0
COMMIT_S = 12.0
DEATH_S = 10.0  # so soon the others are told; it takes about one


def join(rank: int, world: int, rendezvous: str) -> tuple[torch.Tensor, dict[str, DTensor]]:
    """Make a process group with a short time-out; this rank's share, and the state."""
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", timedelta(seconds=GROUP_TIMEOUT_S), world_size=world, rank=rank
    )
    local = torch.full((1 << 16,), 10.0 + rank)
    return local, {"w": DTensor.from_local(local, init_device_mesh("cpu", (world,)), [Shard(0)])}


def save_slowly(rank: int, world: int, run: str, rendezvous: str) -> float:
    """Save to storage that takes its time at COMMIT, and go on training; how long the result took."""
    _, state = join(rank, world, rendezvous)
    started = time.monotonic()
    pending = ckpt.save(run, 1, state)
    assert time.monotonic() - started < COMMIT_S
    total = torch.ones(1)
    dist.all_reduce(total)
    pending.result(60)
    took_s = time.monotonic() - started
    dist.all_reduce(total)
    assert total.item() == world * world
    dist.destroy_process_group()
    return took_s


def test_s26_storage_slower_than_the_groups_time_out(tmp_path: Path) -> None:
    """No rank waits for storage within a collective: the save returns, commits, and the group works throughout."""
    slow = store_env(
        {"wrap": "slow", "program": "keeper", "delay_s": COMMIT_S, "match": "COMMIT", "operation": "create"}
    )
    run = str(tmp_path / "run")
    took = run_ranks(2, save_slowly, run, str(tmp_path / "rendezvous"), env=slow, process_group=False)
    assert all(took_s > COMMIT_S > GROUP_TIMEOUT_S for took_s in took)
    assert ckpt.latest(run) == 1


def die_while_saving(rank: int, world: int, run: str, rendezvous: str, moment: str) -> tuple[str, float]:
    """Rank 1 dies in its second save; what rank 0 is told, and how long that took."""
    local, state = join(rank, world, rendezvous)
    ckpt.save(run, 1, state).result(60)
    dist.barrier()
    if rank == 1:
        setattr(KeeperClient, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    local.fill_(20 + rank)
    started = time.monotonic()
    with pytest.raises(ckpt.RankError) as caught:
        ckpt.save(run, 2, state).result(60)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("moment", ["arena", "begin"])
def test_s26_a_rank_that_dies_while_saving(tmp_path: Path, moment: str) -> None:
    """The other is told who died, soon; the step before is the latest."""
    run = str(tmp_path / "run")
    rendezvous = str(tmp_path / "rendezvous")
    answers = run_ranks(2, die_while_saving, run, rendezvous, moment, process_group=False, dies={1})
    text, took_s = answers[0]
    assert "rank 1 (process " in text
    assert "died before its snapshot was staged" in text
    assert took_s < DEATH_S
    assert ckpt.latest(run) == 1
    assert ckpt.verify(run).ok
    assert ckpt.read(run)["w"].unique().tolist() == [10.0, 11.0]
