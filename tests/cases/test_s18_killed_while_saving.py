"""S18: SIGKILL at any moment of a save, to the trainer, to its keeper, or to both."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.retention import prune
from ckpt.reading.verify import verify_all
from ckpt.run import Run
from tests.crash.random_kills import kill_again_and_again

ROUNDS = 50
MODES = ("rank 0", "keeper", "rank 0", "rank 0, keeper", "rank 0", "keeper, rank 0")


def test_s18_fifty_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at random moments: each time the latest step verifies, is of one step throughout, and stays."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    runs = [str(tmp_path / name) for name in ("one", "two")]
    with ThreadPoolExecutor() as threads:
        survivals = list(threads.map(kill_again_and_again, runs, [ROUNDS // 2] * 2, [18, 81], [MODES] * 2))
    assert all(survival.newest > ROUNDS / 4 for survival in survivals)
    assert sum(survival.cut_short for survival in survivals) > 3, "hardly a kill fell into a save"
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
