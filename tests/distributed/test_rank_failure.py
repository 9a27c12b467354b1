"""A rank is dead, stopped, raising, or hangs in storage, at each moment of save and load: the others say who."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ckpt
from tests.crash.jobs import Gate, keepers_of
from tests.distributed.rank_job import LONG_S, PROGRESS_TIMEOUT_S, RANK_TIMEOUT_S, Jobs, Member, RankJob
from tests.members import leave_nothing

ROOT = Path(__file__).parent.parent.parent
BOUND_S = 20.0  # on top of the time-out that is stated: other tests run on the same cores

# moment -> the verb in which it comes, and the rank that goes wrong (-1: the last)
VERBS = {
    "save: opening the run": ("save", 0),  # which only the first save does, so it comes first
    "save: before the copy": ("save", -1),
    "load: settling": ("load", -1),
    "load: choosing": ("load", 0),
    "load: looking": ("load", -1),
    "load: reading": ("load", -1),
    "load: read": ("load", -1),
    "preparing saves": ("enter", -1),
    "stepping": ("step", -1),
}

ALL = os.environ.get("CKPT_RANK_FAILURES") == "all"


def share(names: Iterable[str], first: int, stride: int) -> list[str]:
    """All of them in the full form, CKPT_RANK_FAILURES=all, else some; what one test leaves out another one has."""
    return list(names) if ALL else list(names)[first::stride]


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run's root, which does not exist yet."""
    return str(tmp_path / "run")


@pytest.fixture
def jobs(tmp_path: Path, run: str) -> Iterator[Jobs]:
    """Starts jobs, ``jobs(world, **environment)``."""
    made: list[RankJob] = []

    def make(world: int, **env: str) -> RankJob:
        made.append(RankJob(tmp_path, world, run, env))
        return made[-1]

    yield make
    leave_nothing(made, lambda: keepers_of(tmp_path), tmp_path)


def works(job: RankJob) -> None:
    """The training's process group, a save and a load: all work, on all ranks."""
    world = len(job.members)
    assert job.do("all_reduce") == [world] * world
    step = (ckpt.latest(job.run) or 0) + 1
    job.do("save", step)
    assert job.do("result") == [step] * world
    assert job.do("load") == [step] * world


def begin(job: RankJob, moment: str, fault: str, *arguments: int) -> Member:
    """Have one rank go wrong in the verb of that moment, which all have begun."""
    verb, rank = VERBS[moment]
    victim = job.members[rank]
    if moment == "stepping":
        job.do("enter")
    if verb == "save" and not arguments:
        arguments = ((ckpt.latest(job.run) or 0) + 1,)
    victim.send("arm", moment, fault)
    victim.answer()
    for member in job.members:
        member.send(verb, *arguments)
    return victim


def named(victim: Member, said: str) -> str:
    """A pattern: the rank, its process, and what is known of it."""
    return rf"rank {victim.rank} \(process {victim.pid} on [^)]+\) {re.escape(said)}.*; noticed by rank \d in (the|a) "


@pytest.mark.parametrize(("world", "moments"), [(2, share(VERBS, 0, 3)), (3, share(VERBS, 1, 3))])
def test_a_stopped_rank(jobs: Jobs, world: int, moments: list[str]):
    """The others say so after the time-out; when it goes on it is told, and the next verbs of all work."""
    job = jobs(world)
    for moment in moments:
        victim = begin(job, moment, "stopped")
        victim.stopped()
        started = time.monotonic()
        errors = [member.error(RANK_TIMEOUT_S + BOUND_S) for member in job.survivors(victim)]
        assert time.monotonic() - started < RANK_TIMEOUT_S + BOUND_S
        for error in errors:
            assert error.kind == "RankError", (moment, error)
            assert re.search(named(victim, f"has been stopped for {RANK_TIMEOUT_S:g} s"), error.message), moment
        victim.signal(signal.SIGCONT)
        told = victim.error(BOUND_S)
        assert told.kind == "RankError", (moment, told)
        assert told.message == f"the other ranks have given this one up: {errors[0].message}"
        works(job)
    assert job.end() < BOUND_S


@pytest.mark.parametrize(("world", "moments"), [(2, share(VERBS, 2, 3)), (3, share(VERBS, 0, 3))])
def test_a_dead_rank(jobs: Jobs, world: int, moments: list[str]):
    """The others say so at once, and again in each verb that follows; they end by themselves, and at once."""
    job = jobs(world)
    for moment in moments:
        victim = begin(job, moment, "killed")
        for _ in range(2):
            started = time.monotonic()
            for member in job.survivors(victim):
                error = member.error(BOUND_S)
                assert error.kind == "RankError", (moment, error)
                assert re.search(named(victim, "is dead"), error.message), (moment, error)
                member.send("save", 1000)
            assert time.monotonic() - started < BOUND_S, moment
        for member in job.survivors(victim):
            member.error(BOUND_S)
        assert job.end((victim,)) < BOUND_S
        job = jobs(world)
        if ckpt.latest(job.run) is None:
            works(job)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_raises(jobs: Jobs, world: int):
    """The others raise its error under its name, and nothing needs to be made anew."""
    job = jobs(world)
    for moment in VERBS:
        if moment == "stepping":  # there it is the training's own error
            continue
        victim = begin(job, moment, "raising")
        for member in job.members:
            error = member.error(BOUND_S)
            if moment in {"load: choosing", "save: opening the run"}:  # rank 0 speaks for all
                assert (error.kind, error.message) == ("CkptError", "rank 0: ArmedError: on purpose")
            elif member is victim:
                assert (error.kind, error.message) == ("ArmedError", "on purpose"), moment
            else:
                assert error.kind == "RankError"
                assert error.message.startswith(f"rank {victim.rank}: ArmedError: on purpose")
        works(job)
    assert job.end() < BOUND_S


# where storage hangs -> the verb, the rank, the operation and keys of its store
HANGS = {
    "save: opening the run": ("save", 0, "create", "writers/*"),
    "load: choosing": ("load", 0, "list", "*"),
    "load: looking": ("load", -1, "get", "part-*"),
    "load: reading": ("load", -1, "read_into", "*.safetensors"),
}


@pytest.mark.parametrize(("world", "moments"), [(2, share(HANGS, 0, 2)), (3, share(HANGS, 1, 2))])
def test_a_rank_that_hangs_in_storage(jobs: Jobs, tmp_path: Path, world: int, moments: list[str]):
    """It raises after the time-out, and so do the others; when storage comes back all works, in the same processes."""
    job = jobs(world)
    if moments[0] != "save: opening the run":
        works(job)
    for number, moment in enumerate(moments):
        verb, rank, operation, match = HANGS[moment]
        victim, release = job.members[rank], tmp_path / f"release-{number}"
        if moment == "save: opening the run":
            for member in job.members:
                member.send("load")  # makes the process group; there is no run yet
            for member in job.members:
                assert member.error().kind == "NotFoundError"
        victim.send("hang", operation, match, str(release))
        victim.answer()
        started = time.monotonic()
        for member in job.members:
            member.send(verb, *([1] if verb == "save" else []))
        for member in job.members:
            error = member.error(PROGRESS_TIMEOUT_S + BOUND_S)
            if member is victim or rank == 0:
                assert error.kind == "StoreError", (moment, error)
            else:
                assert error.kind == "RankError"
                assert error.message.startswith(f"rank {victim.rank}: StoreError: ")
            assert "the storage hangs" in error.message
            assert f" {PROGRESS_TIMEOUT_S:g} s" in error.message
        assert time.monotonic() - started < PROGRESS_TIMEOUT_S + BOUND_S
        if moment == "load: reading":
            for member in job.members:
                member.send("load")
            assert "an earlier read hangs in this process" in victim.error(BOUND_S).message
            for member in job.survivors(victim):
                assert "an earlier read hangs in this process" in member.error(BOUND_S).message
        release.touch()
        wait_until_read(job, victim)
        works(job)
    assert job.end() < BOUND_S


def wait_until_read(job: RankJob, victim: Member) -> None:
    """Storage has come back: wait until what was left behind has ended."""
    victim.send("reads_ended")
    victim.answer()


@pytest.mark.parametrize("world", [2, 3])
def test_a_fault_during_the_copy(jobs: Jobs, world: int):
    """``save`` returns on the others, who need nothing more of that rank; its result tells who it was, on all."""
    job = jobs(world)
    works(job)
    for fault, within_s, kind, said in (
        ("raising", BOUND_S, "RankError", "rank {}: ArmedError: on purpose"),
        ("stopped", PROGRESS_TIMEOUT_S + BOUND_S, "SaveFailedError", "no part from rank {}"),
        ("killed", BOUND_S, "RankError", r"rank {} \(process {}\) died before its snapshot was staged"),
    ):
        victim = job.members[-1]
        victim.send("arm", "save: during the copy", fault)
        victim.answer()
        step = (ckpt.latest(job.run) or 0) + 1
        for member in job.members:
            member.send("save", step)
        started = time.monotonic()
        for member in job.survivors(victim):
            member.answer(BOUND_S)
            member.send("result")
        for member in job.survivors(victim):
            error = member.error(within_s)
            assert error.kind == kind, error
            assert re.search(said.format(victim.rank, victim.pid), error.message), error
            if fault == "stopped":
                assert f"its trainer (process {victim.pid}) is stopped and has copied" in error.message
        assert time.monotonic() - started < within_s
        if fault == "killed":
            break
        if fault == "stopped":
            victim.signal(signal.SIGCONT)
            victim.answer(BOUND_S)
            victim.send("result")
        assert victim.error(BOUND_S).kind == ("ArmedError" if fault == "raising" else "SaveFailedError")
        assert ckpt.latest(job.run) == step - 1
        works(job)
    assert job.end((victim,)) < BOUND_S


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fault_after_staging(jobs: Jobs, tmp_path: Path, fault: int):
    """The keeper has all it needs: the step is committed, whatever becomes of the ranks."""
    gate = Gate(tmp_path, "create", "step-00000001-*/COMMIT")
    job = jobs(3, **gate.env)
    job.do("save", 1)
    job.do("staged")
    gate.reached()
    victim = job.members[-1]
    victim.signal(fault)
    gate.open()
    for member in job.survivors(victim):
        member.send("result")
        assert member.answer(BOUND_S) == 1
    for member in job.survivors(victim):
        member.send("load")
        assert member.error(RANK_TIMEOUT_S + BOUND_S).kind == "RankError"
    if fault == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        victim.send("load")  # the verb that the others were in
        assert victim.error(BOUND_S).kind == "RankError"
        works(job)
    assert job.end((victim,) if fault == signal.SIGKILL else ()) < BOUND_S


SILENCE_TIMEOUT_S = 2.0


def test_a_silent_rank_of_another_host(jobs: Jobs):
    """Nobody can see its process: it is given up when no rank has made progress for long, and named."""
    job = jobs(2)
    job.do("elsewhere", ["here", "there"], SILENCE_TIMEOUT_S)
    works(job)
    victim = begin(job, "load: looking", "stopped")
    victim.stopped()
    error = job.members[0].error(SILENCE_TIMEOUT_S + BOUND_S)
    assert error.kind == "RankError"
    said = f"did not come within {SILENCE_TIMEOUT_S:g} s"
    assert error.message.startswith(f"rank 1 (process {victim.pid} on there) {said}"), error
    victim.signal(signal.SIGCONT)
    assert victim.error(BOUND_S).message.startswith("the other ranks have given this one up: rank 1 ")
    works(job)
    assert job.end() < BOUND_S


def test_a_dead_rank_of_another_host(jobs: Jobs):
    """Its connection breaks: the others say so at once, and who it was."""
    job = jobs(2)
    job.do("elsewhere", ["here", "there"], SILENCE_TIMEOUT_S)
    works(job)
    victim = begin(job, "load: looking", "killed")
    error = job.members[0].error(BOUND_S)
    assert error.kind == "RankError"
    assert error.message.startswith(f"rank 1 (process {victim.pid} on there) did not come, and a connection is broken")
    assert job.end((victim,)) < BOUND_S


def test_what_one_sees_all_learn(jobs: Jobs):
    """A rank is stopped beside another one; a third, on another host, hears of it through the job's store."""
    job = jobs(3)
    job.do("elsewhere", ["here", "there", "there"], 60.0)
    works(job)
    victim = begin(job, "load: reading", "stopped")
    victim.stopped()
    for member in job.survivors(victim):
        error = member.error(RANK_TIMEOUT_S + BOUND_S)
        assert re.search(named(victim, "has been stopped for") + "load", error.message), error
        assert "noticed by rank 1" in error.message
        assert "part of the state was filled before that, and must not be used" in error.message
    victim.signal(signal.SIGCONT)
    victim.error(BOUND_S)
    works(job)
    assert job.end() < BOUND_S


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import ckpt
from ckpt.engine import group

group.RANK_TIMEOUT_S = 1.0
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
with ckpt.Checkpointer(sys.argv[3], {"w": torch.ones(4)}) as checkpointer:
    for step in checkpointer.steps(1000):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_script_ends_beside_a_stopped_rank(tmp_path: Path):
    """A whole interpreter's end, with a collective under way that will never end: it takes no time."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "CKPT_JOB": "one", "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", SCRIPT]
    scripts = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "rendezvous"), str(tmp_path / "run")],
            env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, said = scripts[0].communicate(timeout=LONG_S)
        assert scripts[0].returncode == 1
        assert f"RankError: rank 1 (process {scripts[1].pid} on " in said
        assert "noticed by rank 0 in a training step" in said
    finally:
        for script in scripts:
            script.kill()
            script.communicate()


def test_a_slow_rank_is_waited_for(jobs: Jobs):
    """Storage that is slow on one rank, but answers, keeps the others waiting for as long as it takes."""
    job = jobs(2)
    job.do("elsewhere", ["here", "there"], SILENCE_TIMEOUT_S)
    works(job)
    job.members[0].send("slow", 0.5)
    job.members[0].answer()
    started = time.monotonic()
    assert job.do("load") == [1, 1]
    assert time.monotonic() - started > 2 * SILENCE_TIMEOUT_S
    assert job.end() < BOUND_S
