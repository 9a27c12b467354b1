"""S16: a script ends, one way or another, while its last save is still being written.

The writer is always the keeper, a process; there is no variant that writes from a thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.engine.retention import prune
from ckpt.keeper.client import settle
from ckpt.testing import store_env
from tests.ranks import PRELOAD, run_ranks

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
ENDINGS = {"falls off": 0, "raises": 1, "exits": 3, "vanishes": 0, "is killed": -signal.SIGKILL}
DRAINED = ("falls off", "raises", "exits")

# Step 5 takes the keeper two seconds or more: four files, half a second each.
SLOW = store_env({"wrap": "slow", "program": "keeper", "operation": ["open_sink", "create"], "delay_s": 0.5})


def state(value: int) -> dict[str, object]:
    """Every element tells its step."""
    return {"w": torch.full((1000,), float(value)), "step": value}


def save_and_end(ending: str, run: str) -> None:
    """Step 5 without waiting for it, and then the end."""
    pending = ckpt.save(run, 5, state(5))
    (Path(run).parent / f"{ending}.told").write_text(json.dumps({"done": pending.done}))
    if ending == "raises":
        raise RuntimeError("the script's own error")
    if ending == "exits":
        sys.exit(3)
    if ending == "vanishes":
        os._exit(0)
    if ending == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)


def save_previous(_rank: int, _world: int, runs: list[str]) -> None:
    """Step 4 of every run, as another job left it."""
    for run in runs:
        ckpt.save(run, 4, state(4), wait=True)


def prepare(folder: Path) -> dict[str, str]:
    """Ending -> its run, with step 4 in it."""
    runs = {ending: str(folder / ending.replace(" ", "-")) for ending in ENDINGS}
    run_ranks(1, save_previous, list(runs.values()), process_group=False)
    return runs


def check(ending: str, run: str) -> None:
    """The step is there: at once where the end was one that waits for it, else when the keeper has done its work."""
    told = json.loads((Path(run).parent / f"{ending}.told").read_text())
    assert not told["done"], "the save was over before the script ended"
    if ending not in DRAINED:
        assert settle(run, LONG_S) == []
    assert ckpt.steps(run) == [4, 5], ending
    assert ckpt.verify(run).ok
    for step in (4, 5):
        found = ckpt.read(run, step=step)
        assert torch.equal(found["w"], torch.full((1000,), float(step)))
        assert found["step"] == step


# One interpreter that imports torch once; each fork of it goes on as the script, and ends as a script does.
SCRIPT = """
import json, os, sys
import torch, ckpt.engine.checkpointer
from tests.cases.test_s16_exit_before_the_save import save_and_end

runs, children = json.loads(sys.argv[1]), {}
for ending, run in runs.items():
    child = os.fork()
    if child == 0:
        os.environ["CKPT_JOB"] = run
        os.dup2(os.open(run + ".stderr", os.O_WRONLY | os.O_CREAT), 2)
        break
    children[ending] = child
else:
    codes = {e: os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for e, c in children.items()}
    print(json.dumps(codes), flush=True)
    os._exit(0)
save_and_end(ending, run)
"""


def test_s16_a_script_that_ends_during_its_last_save(tmp_path: Path) -> None:
    """Falls off its end, raises, exits, vanishes or is killed: its exit code is its own, and the step is not lost."""
    runs = prepare(tmp_path)
    environment = {**os.environ, **SLOW, "CKPT_LINGER_S": "0.5"}
    job = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(runs)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout) == ENDINGS
    for ending, run in runs.items():
        check(ending, run)
        said = Path(f"{run}.stderr").read_text()
        assert said.endswith("RuntimeError: the script's own error\n") if ending == "raises" else not said, said


def child(ending: str, run: str) -> None:
    """A process of multiprocessing: it ends without the interpreter's own last words."""
    os.environ.update(SLOW, CKPT_LINGER_S="0.5", CKPT_JOB=run)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of a process that ends
    save_and_end(ending, run)


def test_s16_a_child_process_that_ends_during_its_last_save(tmp_path: Path) -> None:
    """The same for a process of ``multiprocessing``, as torch's launchers start them."""
    runs = prepare(tmp_path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    children = {ending: context.Process(target=child, args=(ending, run)) for ending, run in runs.items()}
    for process in children.values():
        process.start()
    for ending, process in children.items():
        process.join(LONG_S)
        assert process.exitcode == ENDINGS[ending], ending
    for ending, run in runs.items():
        check(ending, run)


def leave_a_block(_rank: int, _world: int, folder: str) -> None:
    """The body of a Checkpointer fails while a save is under way."""
    with ckpt.Checkpointer(folder, state(0), every=ckpt.every(steps=1)) as checkpointer:
        for step in checkpointer.steps(total=10):
            if step == 3:
                raise RuntimeError("the script's own error")


def test_s16_a_block_that_is_left_by_an_error(tmp_path: Path) -> None:
    """Leaving a Checkpointer by an exception waits for the saves under way, and raises that exception."""
    run = str(tmp_path / "run")
    with pytest.raises(AssertionError, match="RuntimeError: the script's own error"):
        run_ranks(1, leave_a_block, run, env=SLOW, process_group=False)
    assert ckpt.steps(run) == [1, 2]


def die_with_the_keeper(_rank: int, _world: int, run: str, waiting: str) -> None:
    """Everything is written but COMMIT; then the whole node goes."""
    pending = ckpt.save(run, 5, state(5))
    while not os.path.exists(waiting):
        assert not pending.done
    os.kill(keeper_client(0).keeper_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def start_again(_rank: int, _world: int, run: str) -> int:
    """The next job."""
    target = state(0)
    step = ckpt.load(run, target).step
    ckpt.save(run, 5, target, wait=True)
    return step


def test_s16_a_node_that_goes_during_its_last_save(tmp_path: Path) -> None:
    """Trainer and keeper both die before COMMIT: the step before is the latest, and debris goes once it is old."""
    run, waiting = str(tmp_path / "run"), tmp_path / "waiting"
    held = {"wrap": "blocking", "program": "keeper", "match": "COMMIT", "release": tmp_path / "no", "waiting": waiting}
    run_ranks(1, save_previous, [run], process_group=False)
    environment = {**store_env(held), "XDG_RUNTIME_DIR": str(tmp_path)}
    run_ranks(1, die_with_the_keeper, run, str(waiting), dies=[0], env=environment, process_group=False)
    debris = Path(run, "step-00000005-w2.1")
    assert len(list(debris.iterdir())) == 2
    assert ckpt.steps(run) == [4]
    assert ckpt.verify(run).ok
    assert run_ranks(1, start_again, run, process_group=False) == [4]
    assert ckpt.steps(run) == [4, 5]
    assert ckpt.read(run)["step"] == 4
    assert debris.exists()
    report = prune(run, grace_s=0)
    assert [removed.folder for removed in report.removed] == [debris.name]
    assert not debris.exists()
    assert ckpt.steps(run) == [4, 5]
    assert ckpt.verify(run).ok
