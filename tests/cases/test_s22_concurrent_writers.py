"""S22: many ranks, two nodes, or two unrelated jobs write into one run at the same time."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.engine.load import read_step
from ckpt.engine.session import session_of
from ckpt.engine.verify import verify_all
from ckpt.run import Run
from ckpt.testing import store_env
from tests.ranks import run_ranks

RANKS, SAVES = 8, 50

# Up to 5 ms before every call, another time for each rank and kind of object.
UNEVEN = store_env(
    *({"wrap": "slow", "match": f"*-0000{rank}-of-*", "delay_s": (rank * 5 % 8) * 0.0007} for rank in range(RANKS)),
    {"wrap": "slow", "match": "COMMIT", "delay_s": 0.003},
    {"wrap": "slow", "operation": "list", "delay_s": 0.001},
)


def save_over_and_over(rank: int, world: int, run: str, keep: int | None) -> list[str]:
    """One step, saved again and again without a wait, every rank a shard of it; the first four ranks are one node."""
    os.environ["CKPT_JOB"] += f"-node{rank // 4}"
    sleeps = random.Random(rank)
    value = distribute_tensor(torch.zeros(32, 2), init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {"w": value, "n": 0, "own": ckpt.per_rank(0)}
    pendings = []
    with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=keep)) as checkpointer:
        for number in range(1, SAVES + 1):
            state["w"].fill_(number)
            state.update(n=number, own=ckpt.per_rank(number))
            time.sleep(sleeps.uniform(0, 0.005))
            pendings.append(checkpointer.save(7))
    return [pending.result().attempt for pending in pendings]


def assert_of_one_writer(run: str | Path) -> dict[int, float]:
    """Every committed attempt holds one number throughout, and every live step verifies; step -> that number."""
    opened = Run.open(run)
    survey = opened.survey()
    found = {}
    for step in survey.steps:
        if step.commit is None:
            continue
        tree = read_step(opened, step.attempt, step.commit)
        numbers = {float(x) for key in ("w", "v") if key in tree for x in tree[key].flatten()}
        numbers |= {float(tree["n"]), *map(float, tree.get("own", []))}
        for parameter in tree.get("model", {}).values():
            numbers |= {float(x) for x in parameter.flatten()}
        assert len(numbers) == 1, (step.attempt, numbers)
        found[step.attempt] = numbers.pop()
    assert all(report.ok for report in verify_all(run))
    return found


def test_s22_eight_ranks_save_one_step_fifty_times(tmp_path: Path) -> None:
    """Two nodes of four ranks, uneven storage: no rank fails, every attempt is a step of one save throughout."""
    run = str(tmp_path / "run")
    outcomes = run_ranks(RANKS, save_over_and_over, run, None, env=UNEVEN)
    assert outcomes == [[f"w1.{number}" for number in range(1, SAVES + 1)]] * RANKS
    found = assert_of_one_writer(run)
    assert {attempt.save: number for attempt, number in found.items()} == {n: float(n) for n in range(1, SAVES + 1)}
    assert ckpt.steps(run) == [7]
    assert ckpt.read(run)["n"] == SAVES
