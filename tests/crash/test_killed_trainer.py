"""SIGKILL of the trainer at each moment of a save: before staging the step before stands, after it this step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.keeper.client import settle
from tests.crash.jobs import HELD, LARGE_NBYTES, LONG_S, MOMENTS, NBYTES, Gate, Job, check_steps, copied_nbytes
from tests.keeper.conftest import wait_for
from tests.keeper.steps import folders

Jobs = Callable[..., Job]

VICTIMS = pytest.mark.parametrize(("world", "victims"), [(1, (0,)), (2, (0,)), (2, (1,)), (2, (0, 1))])


def restart(jobs: Jobs, world: int, expected: int, run: str, nbytes: int = NBYTES) -> None:
    """The job started again restores the step, goes on from it, and leaves no debris that would stay."""
    again = jobs(world, nbytes=nbytes)
    assert again.start() == expected
    again.save(3)
    again.end()
    check_steps(run, [*range(1, expected + 1), 3], world)
    assert len(folders(run)) == expected + 1


@VICTIMS
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_before_staging_the_step_before_stands(
    jobs: Jobs, run: str, moment: str, world: int, victims: tuple[int, ...]
):
    """Whichever ranks die, nobody commits a step of which a share is missing; a rank that lives is told who died."""
    nbytes = LARGE_NBYTES if moment == "copying" else NBYTES
    job = jobs(world, nbytes=nbytes)
    assert job.start() is None
    job.save(1)
    dying = [job.ranks[rank] for rank in victims]
    for rank in dying:
        rank.do("stop_at", moment)
    for rank in job.ranks:
        rank.send("save", 2)
    for rank in dying:
        rank.stopped()
    if moment == "copying":
        wait_for(lambda: copied_nbytes(run, 2) > 0, "the keeper writes behind the copy")
    for rank in dying:
        rank.kill()
    for rank in job.ranks:
        if rank not in dying:
            rank.answer()
            rank.send("result", 2)
            with pytest.raises(Exception, match=rf"rank {dying[0].rank} \(process {dying[0].pid}\) died") as caught:
                rank.answer()
            assert caught.value.kind == "RankError"
            rank.kill()  # as the launcher would
    restart(jobs, world, 1, run, nbytes)


@VICTIMS
@pytest.mark.parametrize("held", HELD)
def test_killed_after_staging_this_step_appears(
    jobs: Jobs, run: str, tmp_path: Path, held: str, world: int, victims: tuple[int, ...]
):
    """However far the keeper had come, it completes the step without the dead, and tells those who live."""
    gate = Gate(tmp_path, *HELD[held])
    nbytes = LARGE_NBYTES if held == "a file is open" else NBYTES
    job = jobs(world, nbytes=nbytes, **gate.env)
    job.start()
    job.save(1)
    job.do("save", 2)
    gate.reached()
    for rank in victims:
        job.ranks[rank].kill()
    check_steps(run, [1], world)
    gate.open()
    for rank in job.ranks:
        if rank.rank not in victims:
            assert rank.do("result", 2) == "w1.2"
    assert settle(run, LONG_S) == []
    check_steps(run, [1, 2], world)
    job.kill()
    restart(jobs, world, 2, run, nbytes)


@VICTIMS
def test_killed_after_commit_this_step_stays(jobs: Jobs, run: str, world: int, victims: tuple[int, ...]):
    """What was committed is what the restarted job begins with."""
    job = jobs(world)
    job.start()
    job.save(1)
    job.save(2)
    for rank in victims:
        job.ranks[rank].kill()
    job.kill()
    restart(jobs, world, 2, run)


@pytest.mark.parametrize("staged", [0, 1])
def test_one_rank_has_staged_and_both_are_killed(jobs: Jobs, run: str, staged: int):
    """A step that only one rank has staged is none, however well the keeper has that share."""
    job = jobs(2, nbytes=LARGE_NBYTES)
    job.start()
    job.save(1)
    other = job.ranks[1 - staged]
    other.do("stop_at", "copying")
    for rank in job.ranks:
        rank.send("save", 2)
    other.stopped()
    job.ranks[staged].answer()
    job.kill()
    restart(jobs, 2, 1, run, LARGE_NBYTES)
