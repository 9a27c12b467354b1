"""Two jobs on one node at once: keepers and arenas of their own; in one run by mistake, the older one is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import FencedError
from ckpt.keeper.client import statuses
from tests.crash.jobs import LARGE_NBYTES, Job, check_steps

Jobs = Callable[..., Job]


@pytest.mark.parametrize("world", [1, 2])
def test_two_jobs_save_at_the_same_time(jobs: Jobs, tmp_path: Path, world: int):
    """Both stand in the middle of a copy: two keepers, each with nothing but its own job's ranks, arenas and saves."""
    runs = [str(tmp_path / name) for name in ("a", "b")]
    both = [jobs(world, job=f"job {run}", of=run, nbytes=LARGE_NBYTES) for run in runs]
    for job in both:
        assert job.start() is None
        job.save(1)
        job.do("stop_at", "copying")
    for job in both:
        for rank in job.ranks:
            rank.send("save", 2)
    for job in both:
        for rank in job.ranks:
            rank.stopped()
    found = {status.pid: status for status in statuses()}
    assert set(found) == {job.keeper_pid for job in both}
    assert len(found) == 2
    for job in both:
        status = found[job.keeper_pid]
        assert status.job == f"CKPT_JOB=job {job.run}"
        assert [client.pid for client in status.clients] == [rank.pid for rank in job.ranks]
        assert {arena.run for arena in status.arenas} == {save.run for save in status.saves} == {job.run}
        assert sorted(arena.rank for arena in status.arenas if arena.state == "filling") == list(range(world))
    for job in both:
        for rank in job.ranks:
            rank.go_on()
    for job in both:
        for rank in job.ranks:
            rank.answer()
        job.do("result", 2)
        job.end()
    for run in runs:
        check_steps(run, [1, 2], world)


def test_a_killed_job_leaves_the_other_one_alone(jobs: Jobs, tmp_path: Path):
    """Trainer and keeper of one job are killed in the middle of a copy; the other one's save commits."""
    runs = [str(tmp_path / name) for name in ("a", "b")]
    dying, living = (jobs(1, job=run, of=run, nbytes=LARGE_NBYTES) for run in runs)
    for job in (dying, living):
        job.start()
        job.save(1)
        job.do("stop_at", "copying")
        for rank in job.ranks:
            rank.send("save", 2)
            rank.stopped()
    dying.kill_keeper()
    dying.kill()
    living.ranks[0].go_on()
    living.ranks[0].answer()
    living.do("result", 2)
    living.end()
    check_steps(runs[0], [1], 1)
    check_steps(runs[1], [1, 2], 1)


@pytest.mark.parametrize("world", [1, 2])
def test_two_jobs_in_one_run_by_mistake(jobs: Jobs, run: str, world: int):
    """The younger one holds the run; the older one's next save is no step, and its ranks are told who holds it."""
    older = jobs(world, job="older")
    older.start()
    older.save(1)
    younger = jobs(world, job="younger")
    assert younger.start() == 1
    younger.save(2)
    assert older.keeper_pid != younger.keeper_pid
    older.do("save", 2)
    for error in older.errors("result", 2):
        assert error.kind == FencedError.__name__
        assert "writer 2 holds the run: job younger" in error.message
    for error in older.errors("save", 3):
        assert error.kind == FencedError.__name__
    younger.save(3)
    older.kill()
    younger.end()
    check_steps(run, [1, 2, 3], world)
