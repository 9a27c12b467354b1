"""A lost save fails one later save only, also when the ranks learn of it at different times."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.testing import store_env
from tests.keeper.conftest import wait_for
from tests.ranks import run_ranks


def lose_a_keeper(rank: int, _world: int, run: str, waiting: Path, release: Path) -> list[str]:
    """Each rank is a node; rank 1's keeper dies with its part of step 2. What the next two saves raise."""
    os.environ["CKPT_JOB"] += f"-node{rank}"
    told = []
    with ckpt.Checkpointer(run, {"w": torch.ones(100)}, progress_timeout_s=2.0) as checkpointer:
        checkpointer.save(1).result(30)
        lost = checkpointer.save(2)
        if rank == 1:
            wait_for(waiting.exists, "its part is held")
            os.kill(keeper_client(rank).keeper_pid, signal.SIGKILL)
            wait_for(lambda: lost.done, "it knows")
            release.touch()
        for step in (3, 4):
            try:
                checkpointer.save(step).result(30)
                told.append("")
            except ckpt.CkptError as error:
                told.append(str(error))
            wait_for(lambda: lost.done, "both know")
    return told


def test_a_lost_save_fails_one_later_save_only(tmp_path: Path):
    """Rank 1 knows first and fails save 3 on both ranks; rank 0 learns later: save 4 must not fail for it again."""
    waiting, release = tmp_path / "waiting", tmp_path / "release"
    env = store_env({"wrap": "blocking", "program": "keeper", "operation": "create", "waiting": waiting,
                     "match": "step-00000002-*/part-00001-*", "release": release})  # fmt: skip
    told = run_ranks(2, lose_a_keeper, str(tmp_path / "run"), waiting, release, env=env)
    assert all("the save of step 2 failed" in first for first, _ in told), told
    assert [second for _, second in told] == ["", ""]
