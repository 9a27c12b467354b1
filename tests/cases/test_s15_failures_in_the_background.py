"""S15: writing fails behind the training's back, and nobody may find out by chance.

The second file of step 2 cannot be written; the cause is the system's own word ``boom``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.testing import store_env
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
BOOM = store_env(
    {"wrap": "faulty", "program": "ckpt.keeper", "match": "step-00000002-*", "operation": ["open_sink", "create"],
     "on_nth": 2, "errno": "EIO", "message": "boom"}
)  # fmt: skip


def state(value: int) -> dict[str, object]:
    """Two data files and a part."""
    return {"model": {"w": torch.full((1000,), float(value))}, "v": torch.full((10,), float(value)), "step": value}


def wait_for_it(_rank: int, _world: int, run: str) -> None:
    """(a) Whoever waits for the save is told."""
    ckpt.save(run, 1, state(1), wait=True)
    pending = ckpt.save(run, 2, state(2))
    with pytest.raises(ckpt.StoreError, match=r"save of step 2 .*\(boom\)"):
        pending.result(30)
    assert pending.done
    assert not pending.committed
    assert "boom" in str(pending.error)


def save_again(_rank: int, _world: int, run: str) -> None:
    """(b) Else the next save is, by name of the step; and once told, saving goes on."""
    ckpt.save(run, 1, state(1), wait=True)
    pending = ckpt.save(run, 2, state(2))
    while not pending.done:
        time.sleep(0.01)
    with pytest.raises(ckpt.StoreError, match=r"the save of step 2 failed: .*\(boom\)"):
        ckpt.save(run, 3, state(3))
    assert ckpt.latest(run) == 1
    ckpt.save(run, 3, state(3), wait=True)


def leave_a_block(_rank: int, _world: int, run: str) -> None:
    """(b') Else the end of the Checkpointer is."""
    with (
        pytest.raises(ckpt.StoreError, match=r"step 2 .*\(boom\)"),
        ckpt.Checkpointer(run, state(0), every=ckpt.every(steps=1)) as checkpointer,
    ):
        for step in checkpointer.steps(total=2):
            if step == 2:
                checkpointer.pending.result(30)  # of step 1


@pytest.mark.parametrize(("act", "latest"), [(wait_for_it, 1), (save_again, 3), (leave_a_block, 1)])
def test_s15_whoever_comes_next_is_told(tmp_path: Path, act: object, latest: int) -> None:
    """By wait, by the next save, or by the end of the block, with the cause; step 2 is no step, step 1 is kept."""
    run = str(tmp_path / "run")
    run_ranks(1, act, run, env=BOOM, process_group=False)
    assert ckpt.latest(run) == latest
    assert 2 not in ckpt.steps(run)
    assert all(ckpt.verify(run, step=step).ok for step in ckpt.steps(run))
    assert not list(Path(run).glob("step-00000002-*"))


SCRIPT = """
import sys, ckpt
from tests.cases.test_s15_failures_in_the_background import state
run, policy = sys.argv[1:]
ckpt.save(run, 1, state(1), wait=True)
ckpt.save(run, 2, state(2), on_error=policy)
"""


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_s15_a_script_that_ends_says_it_aloud(tmp_path: Path, policy: str) -> None:
    """(c) Nobody waits, the interpreter ends: the cause, and what the newest step is, stand on standard error."""
    run = str(tmp_path / "run")
    script = subprocess.run(
        [sys.executable, "-c", SCRIPT, run, policy],
        cwd=ROOT, env={**os.environ, **BOOM}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "(boom)" in script.stderr, script.stderr
    assert "step 2" in script.stderr
    assert f"1 of 2 saves failed, the newest committed step is 1 in {run}" in script.stderr
    assert script.stdout == ""
    assert ckpt.steps(run) == [1]


def go_on(rank: int, _world: int, run: str, stderr: str) -> tuple[list[tuple[int, str, str]], int | None]:
    """Three steps of training that gets over failed saves."""
    os.dup2(os.open(f"{stderr}-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    with ckpt.Checkpointer(run, state(0), every=ckpt.every(steps=1), on_error="warn") as checkpointer:
        for _ in checkpointer.steps(total=3):
            pass
        checkpointer.drain()
        failed = [
            (one.step, one.attempt, f"{type(one.error).__name__}: {one.error}") for one in checkpointer.failed_saves
        ]
    return failed, ckpt.latest(run)


def test_s15_training_that_gets_over_it_says_it_too(tmp_path: Path) -> None:
    """With ``on_error="warn"`` the loop goes on on both ranks, lists the failed save, and tells how many there were."""
    run, stderr = str(tmp_path / "run"), str(tmp_path / "stderr")
    outcomes = run_ranks(2, go_on, run, stderr, env=BOOM)
    for failed, latest in outcomes:
        assert latest == 3
        ((step, attempt, error),) = failed
        assert (step, attempt) == (2, "w1.2")
        assert "boom" in error
    assert ckpt.steps(run) == [1, 3]
    said = [Path(f"{stderr}-{rank}").read_text() for rank in range(2)]
    assert said[0].count("step 2 was not saved, training goes on: ") == 1
    assert f"1 of 3 saves failed, the newest committed step is 3 in {run}\n" in said[0]
    at_fault = [error.startswith("StoreError") for ((_, _, error),), _ in outcomes]
    assert sum(at_fault) == 1, "one rank's file failed, the other heard of it"
    assert said[1].count("was not saved") == int(at_fault[1])
