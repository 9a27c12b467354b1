"""S18: SIGKILL at any moment of a save, to the trainer, to its keeper, or to both."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.engine.retention import prune
from ckpt.keeper.client import settle
from ckpt.keeper.place import process_identity
from ckpt.reading.verify import verify_all
from ckpt.run import Run
from tests.ranks import PRELOAD

ELEMENTS = (1 << 20) // 4
ROUNDS = 50
MODES = ("trainer", "keeper", "trainer", "trainer, keeper", "trainer", "keeper, trainer")
LONG_S = 60.0


def save_on(told: Connection, run: str, environment: dict[str, str]) -> None:
    """Restore, then save one step after the other, telling what is staged and what is committed.

    When its keeper has gone it saves once more, with another one, and ends.
    """
    os.environ.update(environment)
    os.dup2(os.open(f"{run}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    state = {"w": torch.zeros(ELEMENTS)}
    # Saves that went with the old keeper, and that nobody was told of before the last save, are told at the end.
    with contextlib.suppress(ckpt.KeeperError), ckpt.Checkpointer(run, state, keep=ckpt.keep(last=3)) as checkpointer:
        step = checkpointer.restored_step or 0
        assert torch.equal(state["w"], torch.full((ELEMENTS,), float(step)))
        keeper = keeper_client(0).keeper_pid
        told.send(("restored", checkpointer.restored_step))
        told.send(("keeper", keeper))
        pendings: list[ckpt.PendingSave] = []
        while True:
            step += 1
            state["w"].fill_(step)
            with contextlib.suppress(ckpt.KeeperError):
                pendings.append(checkpointer.save(step))
                if keeper_client(0).keeper_pid != keeper:
                    told.send(("saved with another keeper", pendings[-1].result(LONG_S).step))
                    return
            for pending in pendings[-3:]:
                if pending.committed:
                    told.send(("committed", pending.step))
                elif pending.staged:
                    told.send(("staged", pending.step))


def hear(ours: Connection) -> list[tuple[str, Any]]:
    """All that a process that has ended has told."""
    heard = []
    with contextlib.suppress(EOFError):
        while True:
            heard.append(ours.recv())
    return heard


def kill_again_and_again(run: str, rounds: int, seed: int) -> tuple[int, int]:
    """One job, killed and started again; the newest step in the end, and how many attempts were cut short."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    environment = {"CKPT_JOB": run, "CKPT_LINGER_S": "10", "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    moments = random.Random(seed)
    newest, keepers, cut_short = 0, {}, set()
    for number in range(rounds):
        mode = MODES[number % len(MODES)]
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=save_on, args=(theirs, run, environment))
        process.start()
        theirs.close()
        try:
            (_, restored), (_, keeper) = ours.recv(), ours.recv()
            assert (restored or 0) == newest, f"round {number}"
            keepers[keeper] = process_identity(keeper)
            time.sleep(moments.uniform(0.005, 0.2))
            for name in mode.split(", "):
                os.kill(keeper if name == "keeper" else process.pid, signal.SIGKILL)
            heard = hear(ours)
        except BaseException:
            process.kill()
            print(Path(f"{run}.stderr").read_text()[-3000:])  # noqa: T201 - shown when the test fails
            raise
        finally:
            process.join(LONG_S)
            ours.close()
        assert process.exitcode == (0 if mode == "keeper" else -signal.SIGKILL), (number, mode)
        assert settle(run, LONG_S) == []
        promised = {step for kind, step in heard if kind != "staged" or mode == "trainer"}
        assert mode != "keeper" or heard[-1][0] == "saved with another keeper"
        before, newest = newest, ckpt.latest(run) or 0
        assert newest >= max(before, *promised, 0), (number, mode, heard)
        if newest:
            assert ckpt.verify(run).ok, (number, mode)
            assert torch.equal(ckpt.read(run)["w"], torch.full((ELEMENTS,), float(newest))), (number, mode)
        cut_short |= {state.attempt for state in Run.open(run).survey().steps if state.commit is None}
    for pid, identity in keepers.items():
        if identity and process_identity(pid) == identity:
            os.kill(pid, signal.SIGKILL)
    return newest, len(cut_short)


def test_s18_fifty_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at random moments: each time the latest step verifies, is of one step throughout, and stays."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    runs = [str(tmp_path / name) for name in ("one", "two")]
    with ThreadPoolExecutor() as threads:
        outcomes = list(threads.map(kill_again_and_again, runs, [ROUNDS // 2] * 2, [18, 81]))
    assert all(newest > ROUNDS / 4 for newest, _ in outcomes)
    assert sum(cut_short for _, cut_short in outcomes) > 3, "hardly a kill fell into a save"
    for run in runs:
        steps = ckpt.steps(run)
        assert len(steps) >= 3
        prune(run, grace_s=0)
        assert ckpt.steps(run) == steps
        assert all(report.ok for report in verify_all(run))


def test_s18_killed_while_opening_the_run(tmp_path: Path) -> None:
    """Between the folder of the first writer's record and that record: the job starts anew, as in an empty run."""
    run = tmp_path / "run"
    (run / "writers").mkdir(parents=True)
    assert ckpt.latest(run) is None
    with pytest.raises(ckpt.NotFoundError, match="no run here"):
        ckpt.load(run, {"w": torch.zeros(3)})
    with ckpt.Checkpointer(run, {"w": torch.zeros(3)}) as checkpointer:
        assert list(checkpointer.steps(total=2)) == [1, 2]
    assert ckpt.steps(run) == [2]


def truncated_shard(folder: Path) -> str:
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    return file.name


def missing_shard(folder: Path) -> str:
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    return file.name


def empty_part(folder: Path) -> str:
    (file,) = folder.glob("part-*.json")
    os.truncate(file, 0)
    return file.name


def empty_commit(folder: Path) -> str:
    os.truncate(folder / "COMMIT", 0)
    return "COMMIT"


def torn_commit(folder: Path) -> str:
    os.truncate(folder / "COMMIT", (folder / "COMMIT").stat().st_size // 2)
    return "COMMIT"


def data_only(folder: Path) -> str:
    (folder / "COMMIT").unlink()
    return "no COMMIT"


def temporary_files_only(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".COMMIT.tmp").write_text("{}")
    (folder / "tmp1234").write_bytes(b"\0" * 100)
    return "no COMMIT"


DEBRIS = (
    truncated_shard,
    missing_shard,
    empty_part,
    empty_commit,
    torn_commit,
    data_only,
    temporary_files_only,
)


def test_s18_debris_is_passed_over_with_a_reason(tmp_path: Path) -> None:
    """Steps cut short in every way: each is passed over by name and reason, and swept without the good one."""
    run = tmp_path / "run"
    for step in range(1, len(DEBRIS) + 2):
        ckpt.save(run, step, {"w": torch.full((5000,), float(step))}, wait=True)
    named = {}
    for step, damage in enumerate(DEBRIS, 2):
        (folder,) = run.glob(f"step-{step:08}-*")
        named[step] = damage(folder)

    target = {"w": torch.zeros(5000)}
    report = ckpt.load(run, target)
    assert report.step == 1
    assert torch.equal(target["w"], torch.ones(5000))
    told = {skip.step: skip.why for skip in report.skipped}
    told |= {s.attempt.step: s.why for s in Run.open(run).survey().steps if s.commit is None}
    assert sorted(told) == sorted(named)
    for step, name in named.items():
        assert name in told[step], told[step]
        assert not ckpt_verifies(run, step)
    assert ckpt_verifies(run, 1)

    ckpt.save(run, 2, target, wait=True)  # of a new writer: from now on no older save can become a step
    prune(run, not_live=True, grace_s=0)
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000001-w1.1", "step-00000002-w2.1"]
    assert ckpt.steps(run) == [1, 2]
    assert all(report.ok for report in verify_all(run))


def ckpt_verifies(run: Path, step: int) -> bool:
    """Whether a step is there and whole."""
    try:
        return ckpt.verify(run, step=step).ok
    except (ckpt.NotFoundError, ckpt.DamagedError):
        return False
