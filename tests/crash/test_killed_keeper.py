"""SIGKILL of the keeper at each moment: the next save says so, starts another one and commits; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.cli import main
from tests.crash.jobs import (
    HELD,
    LARGE_NBYTES,
    MOMENTS,
    NBYTES,
    Gate,
    Job,
    Member,
    check_steps,
    copied_nbytes,
    error_of,
)
from tests.keeper.conftest import TrainerError, is_alive, wait_for
from tests.keeper.steps import folders

Jobs = Callable[..., Job]

WORLDS = pytest.mark.parametrize("world", [1, 2])
GONE = "the keeper is gone; starting another one"


def save_with_another_keeper(job: Job, step: int) -> None:
    """Each rank notices at its next save and says so; all get the same new keeper, and the save commits."""
    dead = job.keeper_pid
    said = [rank.stderr().count(GONE) for rank in job.ranks]
    job.save(step)
    assert [rank.stderr().count(GONE) - before for rank, before in zip(job.ranks, said, strict=True)] == [1] * len(said)
    (job.keeper_pid,) = set(job.do("keeper"))
    assert job.keeper_pid != dead
    assert is_alive(job.keeper_pid)


def failure_of(rank: Member, step: int) -> TrainerError:
    """Why the save that is under way failed, which ``save`` tells, or ``result``.

    Until the dead keeper's last thread is gone its socket is open, and takes what nobody will read.
    """
    try:
        rank.answer()
    except TrainerError as error:
        return error
    rank.send("result", step)
    return error_of(rank)


def sweep(run: str, steps: list[int], world: int) -> None:
    """These are the steps, and ``ckpt prune`` removes all else."""
    check_steps(run, steps, world)
    assert main(["prune", run, "--grace-s", "0"]) == 0
    assert len(folders(run)) == len(steps)
    check_steps(run, steps, world)


@WORLDS
def test_killed_between_saves(jobs: Jobs, run: str, world: int):
    """Nothing was under way, so nothing fails."""
    job = jobs(world)
    job.start()
    job.save(1)
    job.kill_keeper()
    job.do("notice")
    save_with_another_keeper(job, 2)
    job.end()
    sweep(run, [1, 2], world)


@WORLDS
def test_killed_when_a_save_asks_for_memory(jobs: Jobs, run: str, world: int):
    """Nothing of the save was lost with it: another keeper is started, each rank says so, and the save commits."""
    job = jobs(world)
    job.start()
    job.save(1)
    job.do("stop_at", "asking")
    for rank in job.ranks:
        rank.send("save", 2)
    for rank in job.ranks:
        rank.stopped()
    job.kill_keeper()
    for rank in job.ranks:
        rank.go_on()
    for rank in job.ranks:
        rank.answer()
    job.do("result", 2)
    for rank in job.ranks:
        assert GONE in rank.stderr()
    job.end()
    sweep(run, [1, 2], world)


@WORLDS
@pytest.mark.parametrize("moment", MOMENTS[2:])
def test_killed_while_the_trainer_saves(jobs: Jobs, run: str, moment: str, world: int):
    """That save fails on every rank with a KeeperError, from ``save`` or from ``result``; the next one commits."""
    job = jobs(world, nbytes=LARGE_NBYTES if moment == "copying" else NBYTES)
    job.start()
    job.save(1)
    job.do("stop_at", moment)
    for rank in job.ranks:
        rank.send("save", 2)
    for rank in job.ranks:
        rank.stopped()
    if moment == "copying":
        wait_for(lambda: copied_nbytes(run, 2) > 0, "the keeper writes behind the copy")
    job.kill_keeper()
    for rank in job.ranks:
        rank.go_on()
    for error in [failure_of(rank, 2) for rank in job.ranks]:
        assert (error.kind, "is gone" in error.message) == ("KeeperError", True), error
    check_steps(run, [1], world)
    save_with_another_keeper(job, 3)
    job.end()
    sweep(run, [1, 3], world)


@WORLDS
@pytest.mark.parametrize("held", HELD)
def test_killed_while_it_writes(jobs: Jobs, run: str, tmp_path: Path, held: str, world: int):
    """What was staged dies with it, and its trainers are told; what was committed stays, and the next save commits."""
    gate = Gate(tmp_path, *HELD[held])
    job = jobs(world, nbytes=LARGE_NBYTES if held == "a file is open" else NBYTES, **gate.env)
    job.start()
    job.save(1)
    job.do("save", 2)
    gate.reached()
    job.kill_keeper()
    for error in job.errors("result", 2):
        assert (error.kind, "is gone" in error.message) == ("KeeperError", True), error
    check_steps(run, [1], world)
    gate.open()
    save_with_another_keeper(job, 3)
    job.end()
    sweep(run, [1, 3], world)


@WORLDS
def test_a_save_that_nobody_asked_about_is_told_by_the_next(jobs: Jobs, run: str, tmp_path: Path, world: int):
    """The trainer never waited for it: the next save raises what became of it, and the one after that commits."""
    gate = Gate(tmp_path, *HELD["a file is open"])
    job = jobs(world, **gate.env)
    job.start()
    job.save(1)
    job.do("save", 2)
    gate.reached()
    job.kill_keeper()
    job.do("notice")
    gate.open()
    for error in job.errors("save", 3):
        assert error.kind in {"KeeperError", "RankError"}
        assert "the save of step 2 failed: the keeper" in error.message
    save_with_another_keeper(job, 3)
    job.end()
    sweep(run, [1, 3], world)


@WORLDS
@pytest.mark.parametrize(
    ("operation", "match"), [("delete", "step-00000001-*/COMMIT"), ("delete_folder", "step-00000001-*")]
)
def test_killed_after_commit_during_retention(
    jobs: Jobs, run: str, tmp_path: Path, operation: str, match: str, world: int
):
    """The trainer cannot know that the step is committed, but it is; what retention had begun, the next ones end."""
    gate = Gate(tmp_path, operation, match)
    job = jobs(world, **gate.env)
    job.start(2)
    job.save(1)
    job.save(2)
    job.do("save", 3)
    gate.reached()
    job.kill_keeper()
    for error in job.errors("result", 3):
        assert (error.kind, "committed steps are safe" in error.message) == ("KeeperError", True), error
    check_steps(run, [1, 2, 3] if operation == "delete" else [2, 3], world)
    gate.open()
    save_with_another_keeper(job, 4)
    job.end()
    sweep(run, [3, 4], world)


@WORLDS
def test_keeper_and_trainers_killed_together(jobs: Jobs, run: str, tmp_path: Path, world: int):
    """As when the node dies, but for its disk: the restarted job has the step before, and another keeper."""
    gate = Gate(tmp_path, *HELD["parts are durable"])
    job = jobs(world, **gate.env)
    job.start()
    job.save(1)
    job.do("save", 2)
    gate.reached()
    job.kill_keeper()
    job.kill()
    again = jobs(world)
    assert again.start() == 1
    assert again.keeper_pid != job.keeper_pid
    again.save(2)
    again.end()
    sweep(run, [1, 2], world)
