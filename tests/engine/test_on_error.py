"""``on_error``: which failed saves training gets over, which it never does, and that none goes unnoticed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.run import Run
from ckpt.testing import store_env
from tests.engine.storage_faults import Fault, Sleeping
from tests.keeper.conftest import wait_for
from tests.ranks import run_ranks

LONG_S = 30.0


def state(value: int = 0) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value))}


def test_the_policy_is_one_of_two(tmp_path: Path) -> None:
    """Any other word is refused, naming the option."""
    with pytest.raises(ckpt.BadInputError, match="on_error='ignore': expected one of raise, warn"):
        ckpt.save(tmp_path / "run", 1, state(), on_error="ignore")


# -- what is got over ----------------------------------------------------------------------


def hold_and_kill(rank: int, _world: int, run: str, waiting: str) -> list[tuple[int, str, int]]:
    """Step 2 is held before its COMMIT; then its keeper dies."""
    import torch.distributed as dist

    with ckpt.Checkpointer(run, state(), on_error="warn") as checkpointer:
        checkpointer.save(1).result(LONG_S)
        lost = checkpointer.save(2)
        wait_for(lambda: os.path.exists(waiting), "it is held")
        dist.barrier()
        pid = keeper_client(rank).keeper_pid
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: lost.done, "both know")
        checkpointer.save(3).result(LONG_S)
        with pytest.raises(ckpt.KeeperError, match="is gone"):
            lost.result()
        return [(one.step, type(one.error).__name__, one.error.exit_code) for one in checkpointer.failed_saves]


def test_a_lost_keeper_is_got_over(tmp_path: Path) -> None:
    """Another keeper makes the next save; the lost one is listed on both ranks, and its ``result`` still raises."""
    run, waiting = str(tmp_path / "run"), str(tmp_path / "waiting")
    env = store_env({"wrap": "blocking", "program": "ckpt.keeper", "operation": "create",
                     "match": "step-00000002-*/COMMIT", "release": tmp_path / "never", "waiting": waiting})  # fmt: skip
    assert run_ranks(2, hold_and_kill, run, waiting, env=env) == [[(2, "KeeperError", 10)]] * 2
    assert ckpt.steps(run) == [1, 3]


WRITERS = Fault("no writer can be registered", "read-only", operation="create", match="writers/*", errno="EROFS")
HANGS = Fault("no writer comes to an end", "create has not come to an end in 1 s", operation="create",
              match="writers/*", wrap="blocking")  # fmt: skip
for _fault in (WRITERS, HANGS):
    del _fault.spec["program"]  # it is the trainer that registers it


def begin_later(rank: int, _world: int, run: str, fault: Fault, sleeping: Sleeping) -> list[Any]:
    """Not even the run can be opened for writing at the first save."""
    import torch.distributed as dist

    with ckpt.Checkpointer(run, state(), on_error="warn", progress_timeout_s=1.0) as checkpointer:
        with sleeping.awake(fault) if rank == 0 else contextlib.nullcontext():
            dist.barrier()
            first = checkpointer.save(1)
            dist.barrier()
        dist.barrier()
        checkpointer.save(2).result(LONG_S)
        (failed,) = checkpointer.failed_saves
        assert failed.error is first.error
        assert fault.says in str(failed.error)
    return [first.attempt, first.done, first.committed, first.staged, type(first.error).__name__]


@pytest.mark.parametrize("fault", [WRITERS, HANGS], ids=["refused", "hangs"])
def test_a_run_that_cannot_be_opened_yet(tmp_path: Path, fault: Fault) -> None:
    """The save fails before it has a number, alike on both ranks, and the next one is the first."""
    sleeping, run = Sleeping(tmp_path, [fault]), str(tmp_path / "run")
    expected = ["", True, False, False, "StoreError"]
    assert run_ranks(2, begin_later, run, fault, sleeping, env=sleeping.env) == [expected] * 2
    assert ckpt.steps(run) == [2]
    assert ckpt.verify(run).ok


def lack_memory(rank: int, _world: int, run: str) -> tuple[str, int, int]:
    """Only rank 1's keeper lends no arena for one save. Each rank is a node."""
    os.environ["CKPT_JOB"] += f"-node{rank}"
    ckpt.save(run, 1, state(), on_error="warn", wait=True)
    budget = 1 if rank == 1 else None
    failed = ckpt.save(run, 2, {"w": torch.zeros(1 << 22), "v": torch.zeros(1 << 22)}, on_error="warn",
                       budget_bytes=budget, progress_timeout_s=10.0, wait=True)  # fmt: skip
    ckpt.save(run, 3, state(), on_error="warn").result(LONG_S)
    error = failed.error
    assert error is not None
    return type(error).__name__, error.exit_code, len(ckpt.steps(run))


def test_a_rank_without_memory(tmp_path: Path) -> None:
    """Its own error there, another rank's here, with the cause's exit code; both get over it, also with ``wait``."""
    outcomes = run_ranks(2, lack_memory, str(tmp_path / "run"))
    assert outcomes == [("RankError", 10, 2), ("KeeperError", 10, 2)]


COMMITS = Fault("no COMMIT", "", operation="create", match="COMMIT", errno="EIO")


def stop_while_failing(_rank: int, _world: int, run: str, sleeping: Sleeping) -> str:
    """SIGTERM, and the last save fails."""
    awake = sleeping.awake(COMMITS)
    with (
        pytest.raises(ckpt.Preempted) as caught,
        ckpt.Checkpointer(run, state(), every=ckpt.every(steps=1), on_error="warn") as checkpointer,
    ):
        for step in checkpointer.steps(total=10):
            if step == 2:
                checkpointer.drain()
                awake.__enter__()
                os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 75
    return str(caught.value)


def test_a_stop_does_not_claim_what_was_not_saved(tmp_path: Path) -> None:
    """Stopped by SIGTERM the job ends as one to start again, and says that its last step was not saved."""
    sleeping, run = Sleeping(tmp_path, [COMMITS]), str(tmp_path / "run")
    (said,) = run_ranks(1, stop_while_failing, run, sleeping, env=sleeping.env, process_group=False)
    assert said.startswith("stopped by SIGTERM at step 2, which was not saved: save of step 2 (w1.2) failed: ")
    assert said.endswith("; start the job again to go on")
    assert ckpt.steps(run) == [1]


# -- what is never got over ----------------------------------------------------------------


def be_fenced(_rank: int, _world: int, run: str) -> None:
    """Another job has taken the run."""
    checkpointer = ckpt.Checkpointer(run, state(), on_error="warn").__enter__()
    checkpointer.save(1).result(LONG_S)
    Run.open(run).open_writer(job="another", world=1, resumed_from=1)
    lost = checkpointer.save(2)
    wait_for(lambda: lost.done, "it is refused")
    with pytest.raises(ckpt.FencedError, match="another"):
        checkpointer.save(3)
    assert [one.step for one in checkpointer.failed_saves] == [2]


def give_what_cannot_be_saved(_rank: int, _world: int, run: str) -> None:
    """Bad input is the program's own fault."""
    with pytest.raises(ckpt.UnsupportedValueError):
        ckpt.save(run, 1, {"f": lambda: 0}, on_error="warn")
    with pytest.raises(ckpt.BadInputError):
        ckpt.save(run, -1, state(), on_error="warn")
    ckpt.save(run, 5, state(), on_error="warn", wait=True)
    with pytest.raises(ckpt.BadInputError, match="before step 5"):
        ckpt.save(run, 4, state(), on_error="warn")


def change_what_is_copied(_rank: int, _world: int, run: str) -> None:
    """A parameter that changes while overlap copies it."""
    model = torch.nn.Linear(3000, 3000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = {"model": model, "optimizer": optimizer}
    ckpt.save(run, 1, mine, wait=True)
    from ckpt.snapshot import overlap

    copy = overlap.copy_into
    changed = []

    def change_and_copy(*arguments: Any, **keywords: Any) -> Any:
        model.weight.data += 1
        changed.append(True)
        return copy(*arguments, **keywords)

    overlap.copy_into = change_and_copy
    pending = ckpt.save(run, 2, mine, overlap=True, on_error="warn")
    wait_for(lambda: pending.done, "it has failed")
    overlap.copy_into = copy
    assert changed
    with pytest.raises(ckpt.CkptError, match="changed while a save with overlap=True was still copying"):
        ckpt.save(run, 3, mine, on_error="warn")


@pytest.mark.parametrize("act", [be_fenced, give_what_cannot_be_saved, change_what_is_copied])
def test_what_no_policy_gets_over(tmp_path: Path, act: Any) -> None:
    """Somebody else's run, and a state that cannot be saved, end training whatever ``on_error`` says."""
    run_ranks(1, act, str(tmp_path / "run"), process_group=False)


def disagree(rank: int, _world: int, run: str) -> None:
    """One rank would go on and the other would not."""
    with pytest.raises(ckpt.BadInputError, match=r"different on_error: \['raise', 'warn'\]; give all the same"):
        ckpt.save(run, 1, state(), on_error=("raise", "warn")[rank])


def test_all_ranks_have_one_policy(tmp_path: Path) -> None:
    """Different ones are refused on all ranks."""
    run_ranks(2, disagree, str(tmp_path / "run"))
