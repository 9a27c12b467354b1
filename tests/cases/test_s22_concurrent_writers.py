"""S22: many ranks, two nodes, or two unrelated jobs write into one run at the same time."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.engine.load import read_step
from ckpt.engine.session import session_of
from ckpt.format.commit import Attempt
from ckpt.reading.verify import verify_all
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


def save_over_and_over(rank: int, world: int, run: str, saves: int, keep: int | None) -> list[str]:
    """One step, saved again and again without a wait, every rank a shard of it; the first four ranks are one node."""
    os.environ["CKPT_JOB"] += f"-node{rank // 4}"
    sleeps = random.Random(rank)
    value = distribute_tensor(torch.zeros(32, 2), init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {"w": value, "n": 0, "own": ckpt.per_rank(0)}
    pendings = []
    with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=keep)) as checkpointer:
        for number in range(1, saves + 1):
            state["w"].fill_(number)
            state.update(n=number, own=ckpt.per_rank(number))
            time.sleep(sleeps.uniform(0, 0.005))
            pendings.append(checkpointer.save(7))
    return [pending.result().attempt for pending in pendings]


def numbers_in(run: str | Path) -> dict[Attempt, set[float]]:
    """Every number of every committed attempt, live or not."""
    opened = Run.open(run)
    found = {}
    for step in opened.survey().steps:
        if step.commit is not None:
            tree = read_step(opened, step.attempt, step.commit)
            tensors = [tree["w"], *tree.get("model", {}).values()]
            found[step.attempt] = {float(x) for tensor in tensors for x in tensor.flatten()}
            found[step.attempt] |= {float(tree["n"]), *map(float, tree.get("own", []))}
    return found


def test_s22_eight_ranks_save_one_step_fifty_times(tmp_path: Path) -> None:
    """Two nodes of four ranks, uneven storage: no rank fails, every attempt is a step of one save throughout."""
    run = str(tmp_path / "run")
    outcomes = run_ranks(RANKS, save_over_and_over, run, SAVES, None, env=UNEVEN)
    assert outcomes == [[f"w1.{number}" for number in range(1, SAVES + 1)]] * RANKS
    assert numbers_in(run) == {Attempt(7, 1, number): {float(number)} for number in range(1, SAVES + 1)}
    assert ckpt.steps(run) == [7]
    assert ckpt.read(run)["n"] == SAVES
    assert all(report.ok for report in verify_all(run))


def test_s22_eight_ranks_while_older_saves_are_deleted(tmp_path: Path) -> None:
    """The same, each save deleting the one before it: no rank trips over what is gone, and the last one stays."""
    run = str(tmp_path / "run")
    outcomes = run_ranks(RANKS, save_over_and_over, run, 20, 1, env=UNEVEN)
    assert outcomes == [[f"w1.{number}" for number in range(1, 21)]] * RANKS
    assert [path.name for path in Path(run).glob("step-*")] == ["step-00000007-w1.20"]
    assert numbers_in(run) == {Attempt(7, 1, 20): {20.0}}
    assert ckpt.verify(run).ok


def look_too_late(rank: int, world: int, run: str, release: Path) -> list[int]:
    """Two nodes; the second sees no COMMIT before the first has committed all and deleted all but the last."""
    os.environ["CKPT_JOB"] += f"-node{rank}"
    held = {"wrap": "blocking", "program": "keeper", "match": "COMMIT", "operation": "get", "release": release}
    os.environ.update(store_env(held) if rank == 1 else {})
    state = {"w": torch.zeros(3), "n": 0}
    with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=1), progress_timeout_s=20) as checkpointer:
        pendings = []
        for step in range(1, 5):
            state["w"].fill_(step)
            state["n"] = step
            pendings.append(checkpointer.save(step))
        if rank == 0:
            for pending in pendings:
                pending.result()
            release.touch()
        return [pending.result().step for pending in pendings]


def test_s22_a_node_that_looks_after_retention(tmp_path: Path) -> None:
    """A step that came and went while another node was slow was saved there too: no error, and no debris."""
    run = tmp_path / "run"
    assert run_ranks(2, look_too_late, str(run), tmp_path / "release") == [[1, 2, 3, 4]] * 2
    assert [path.name for path in run.glob("step-*")] == ["step-00000004-w1.4"]
    assert numbers_in(run) == {Attempt(4, 1, 4): {4.0}}


def contend(rank: int, world: int, run: str, meet: Path) -> tuple[int, int, list[str]]:
    """A job that knows nothing of the other one saves steps 1 to 20, and loads and goes on when it is refused."""
    os.environ.update(WORLD_SIZE="1", RANK="0", CKPT_JOB=f"{os.environ['CKPT_JOB']}-{rank}")
    waits = random.Random(rank)
    mine = float(rank + 1)
    model = torch.nn.Linear(4, 4)
    (meet / str(rank)).touch()
    while len(list(meet.iterdir())) < 2:
        time.sleep(0.001)
    refusals = []
    step = 0
    for _ in range(300):
        if step == 20:
            break
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(mine)
        state = {"model": model, "w": torch.full((3000,), mine), "n": mine}
        try:
            ckpt.save(run, step + 1, state, wait=waits.random() < 0.5)
            step += 1
        except (ckpt.FencedError, ckpt.BadInputError) as error:
            refusals.append(type(error).__name__)
            with contextlib.suppress(ckpt.NotFoundError):
                step = ckpt.load(run, state).step
    with contextlib.suppress(ckpt.FencedError):
        session_of(run).drain()
    return os.getpid(), step, refusals


def test_s22_two_jobs_in_one_run(tmp_path: Path) -> None:
    """They fence each other by name: every step there ever was is whole, and of one job throughout."""
    run, meet = str(tmp_path / "run"), tmp_path / "meet"
    meet.mkdir()
    slow = store_env({"wrap": "slow", "match": "COMMIT", "delay_s": 0.004}, {"wrap": "slow", "delay_s": 0.001})
    slow["XDG_RUNTIME_DIR"] = str(tmp_path)  # keepers of refused saves keep their logs
    outcomes = run_ranks(2, contend, run, meet, env=slow, process_group=False)
    assert any(refusals for _, _, refusals in outcomes)
    number_of = {pid: float(rank + 1) for rank, (pid, _, _) in enumerate(outcomes)}
    survey = Run.open(run).survey()
    owner = {writer.number: number_of[writer.pid] for writer in survey.writers}
    found = numbers_in(run)
    assert found == {attempt: {owner[attempt.writer]} for attempt in found}
    assert 20 in {step for _, step, _ in outcomes}
    assert survey.live
    assert all(report.ok for report in verify_all(run))


def test_s22_saving_a_step_twice(tmp_path: Path) -> None:
    """The second save with other values replaces the first as a whole; the first stays until retention takes it."""
    run = tmp_path / "run"
    for value in (1.0, 2.0):
        ckpt.save(run, 3, {"w": torch.full((3000,), value), "n": value}, wait=True)
        assert numbers_in(run)[Attempt(3, 1, int(value))] == {value}
    assert ckpt.steps(run) == [3]
    target = {"w": torch.zeros(3000), "n": 0}
    assert ckpt.load(run, target).attempt == "w1.2"
    assert torch.equal(target["w"], torch.full((3000,), 2.0))
    assert target["n"] == 2.0
