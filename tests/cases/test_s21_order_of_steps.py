"""S21: which step is newest is told by its number alone: no text order, no file times, no clock."""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.retention import prune
from ckpt.engine.session import session_of
from ckpt.run import Run
from tests.ranks import run_ranks

STEPS = [9, 10, 99, 100, 999, 1000]


def state(step: int) -> dict[str, object]:
    """Every number tells its step."""
    return {"w": torch.full((10,), float(step)), "n": step}


def save(run: Path, *steps: int, keep: int | None = None) -> None:
    """Go on with a run, if it is there, and save these steps."""
    now = state(0)
    with ckpt.Checkpointer(run, now, keep=ckpt.keep(last=keep)) as checkpointer:
        for step in steps:
            now.update(state(step))
            checkpointer.save(step)


def set_times(run: Path, of: dict[int, int]) -> None:
    """Give every file and folder of a step the year's beginning as its time."""
    for step, year in of.items():
        (folder,) = run.glob(f"step-{step:08d}-*")
        stamp = datetime(year, 1, 1, tzinfo=UTC).timestamp()
        for path in (*folder.iterdir(), folder):
            os.utime(path, (stamp, stamp))


def assert_answers(run: Path, steps: list[int]) -> None:
    """latest, steps, load, read and verify all go by ``steps``."""
    assert ckpt.steps(run) == steps
    assert ckpt.latest(run) == steps[-1]
    target = state(0)
    assert ckpt.load(run, target).step == steps[-1]
    assert target["n"] == steps[-1]
    assert ckpt.read(run)["n"] == steps[-1]
    report = ckpt.verify(run)
    assert (report.ok, report.step) == (True, steps[-1])


def test_s21_the_newest_step_has_the_highest_number(tmp_path: Path) -> None:
    """9, 10, 99, 100, 999, 1000, the last with the oldest file times and the first with times to come."""
    run = tmp_path / "run"
    save(run, *STEPS)
    set_times(run, {1000: 2001, 9: 2035})
    assert_answers(run, STEPS)


def test_s21_retention_goes_by_numbers(tmp_path: Path) -> None:
    """keep=3 leaves 100, 999 and 1000, whatever the files' times say."""
    run = tmp_path / "run"
    save(run, *STEPS[:-1])
    set_times(run, {999: 2001, 100: 2002, 9: 2035, 10: 2034})
    save(run, 1000, keep=3)
    assert_answers(run, [100, 999, 1000])


def test_s21_prune_goes_by_numbers(tmp_path: Path) -> None:
    """The same by hand, afterwards."""
    run = tmp_path / "run"
    save(run, *STEPS)
    set_times(run, {1000: 2001, 9: 2035})
    prune(run, keep_last=3)
    assert_answers(run, [100, 999, 1000])


@pytest.mark.parametrize("equal", [False, True], ids=["as-copied", "all-times-equal"])
def test_s21_a_copied_tree_gives_the_same_answers(tmp_path: Path, equal: bool) -> None:
    """A copy that lost all file times, made in any order, has the same steps, and retention works in it."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    save(run, *STEPS)
    copy.mkdir()
    for path in sorted(run.iterdir(), reverse=True):
        shutil.copytree(path, copy / path.name, copy_function=shutil.copyfile)
    for path in (*copy.rglob("*"), copy) if equal else ():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    assert_answers(copy, STEPS)
    prune(copy, keep_last=2)
    assert_answers(copy, [999, 1000])


def test_s21_padding_does_not_matter(tmp_path: Path) -> None:
    """Numbers longer than their padding are newer than shorter ones; a folder padded otherwise is no step."""
    run = tmp_path / "run"
    steps = [900, 1000, 99_999_999, 100_000_000, 999_999_999, 1_000_000_000]
    save(run, *steps)
    names = sorted(path.name for path in run.glob("step-*"))
    assert names != [next(run.glob(f"step-{step:08d}-*")).name for step in steps], "text order would do"
    assert_answers(run, steps)
    for name in ("step-900-w1.1", "step-0000900-w1.1", "step-0009999999999-w1.7", "step-9999999999-w01.7"):
        shutil.copytree(next(run.glob("step-00000900-*")), run / name)
    assert_answers(run, steps)
    prune(run, keep_last=3)
    assert_answers(run, steps[-3:])


def test_s21_attempts_at_one_step_are_ordered_by_number(tmp_path: Path) -> None:
    """The eleventh save of a step is newer than the second to ninth, and writer 10 is newer than writer 9."""
    run = tmp_path / "run"
    for value in range(1, 12):
        ckpt.save(run, 5, {"n": value}, wait=True)
    assert Run.open(run).find(5).attempt.label == "w1.11"
    assert ckpt.read(run)["n"] == 11
    for writer in range(2, 12):
        target = {"n": 0}
        ckpt.load(run, target)
        assert target["n"] == writer + 9
        session_of(run).writer = None  # as a job of its own would begin
        ckpt.save(run, 5, {"n": writer + 10}, wait=True)
    assert ckpt.steps(run) == [5]
    assert Run.open(run).find(5).attempt.label == "w11.1"
    assert ckpt.read(run)["n"] == 21


# Python runs this in every process that has its folder on the path: each look at the clock is a day before the last.
BACKWARDS = """
import itertools, time
days = itertools.count(1)
time.time = lambda: 1_900_000_000.0 - 86_400.0 * next(days)
"""


def save_backwards(rank: int, world: int, run: Path) -> list[float]:
    """Saves by two writers, with retention, in a job whose clock runs backwards; what the clock said."""
    exec(BACKWARDS, {})
    save(run, *STEPS[:3])
    session_of(run).writer = None  # as a job of its own would begin
    save(run, *STEPS[3:], keep=4)
    commits = [step.commit for step in Run.open(run).survey().live]
    return [commit.created_unix_s for commit in commits if commit is not None] + [time.time(), time.time()]


def test_s21_a_clock_that_runs_backwards(tmp_path: Path) -> None:
    """In trainer and keeper alike: each save is dated before the one it follows, and the answers are the same."""
    (tmp_path / "sitecustomize.py").write_text(BACKWARDS)
    run = tmp_path / "run"
    stamps = run_ranks(1, save_backwards, run, env={"PYTHONPATH": str(tmp_path)}, process_group=False)[0]
    assert len(stamps) == 6
    assert stamps[:4] == sorted(stamps[:4], reverse=True)
    assert stamps[4] > stamps[5]
    writers = Run.open(run).survey().writers
    assert [writer.created_unix_s for writer in writers] == sorted((w.created_unix_s for w in writers), reverse=True)
    assert_answers(run, [99, 100, 999, 1000])
    prune(run, keep_last=2)
    assert_answers(run, [999, 1000])
