"""Several writers in one run: of one step, of different steps, zombies at every moment, rollbacks during a save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ckpt.engine.retention import prune
from ckpt.errors import FencedError
from ckpt.format.commit import Attempt
from ckpt.format.writer import Writer
from ckpt.reading.verify import verify_all
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, write_step
from tests.concurrency.interleave import meeting
from tests.concurrency.moments import at_every_moment
from tests.keeper.conftest import ROOT
from tests.keeper.rank_process import payload
from tests.keeper.steps import check_step, committed, folders

HELD = r"writer 2 holds the run: {job}, host \S+, pid \d+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


def newer_job(run: Run) -> None:
    """Another job goes on from the newest step that it finds, and commits the next one."""
    newest = run.find().attempt.step
    run.open_writer(job="newer", world=1, resumed_from=newest)
    write_step(run, newest + 1, [HandTensor("w", "uint8", (1000,), b"n" * 1000)], values={"by": "newer"})


def test_a_zombie_at_every_moment_of_its_save(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    """Stopped, overtaken, released: its step is never the latest, it is told who holds the run, its debris is swept."""
    ends = []
    for moment, run, had_commit, error in at_every_moment(tmp_path, monkeypatch, newer_job):
        latest = run.find()
        assert latest.attempt.writer == 2, moment
        assert all(report.ok for report in verify_all(run)), moment
        if had_commit:  # a step like any other, from which the newer job went on
            assert error is None, moment
            assert committed(run.url) == [1, 2, 3], moment
            check_step(run.url, 2)
        else:
            assert isinstance(error, FencedError), moment
            assert error.exit_code == 6
            with pytest.raises(FencedError, match=HELD.format(job="newer")):
                raise error
            assert committed(run.url) == [1, 2], moment
            states = run.survey().states
            left = states.get(Attempt(2, 1, 2))
            assert left is None or left[0] == "abandoned", moment
            prune(run, not_live=True, grace_s=0)
            assert folders(run.url) == ["step-00000001-w1.1", "step-00000002-w2.1"], moment
        ends.append(f"{moment[0]} {moment[1]}: {'committed before' if had_commit else 'fenced'}")
    record_property("moments", ends)
    assert len(ends) > 8
    assert any(end.endswith("before") for end in ends)
    assert any(end.startswith("create step-00000002-w1.2/COMMIT: fenced") for end in ends)


def test_a_rollback_at_every_moment_of_a_save(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that was to be is not live, whether its COMMIT came before or after, and its job is told."""
    told = {True: 0, False: 0}  # by whether COMMIT was there
    for moment, run, had_commit, error in at_every_moment(tmp_path, monkeypatch, lambda run: run.rollback(1)):
        if error is None:  # it had looked for newer writers for the last time, and the next save is told
            assert had_commit, moment
        else:
            told[had_commit] += 1
            with pytest.raises(FencedError, match=HELD.format(job="rollback by .*")):
                raise error
        assert committed(run.url) == [1], moment
        assert all(report.ok for report in verify_all(run)), moment
        with pytest.raises(FencedError):
            run.check_not_fenced(1)
        prune(run, not_live=True, grace_s=0)
        assert folders(run.url) == ["step-00000001-w1.1"], moment
    assert told[False] > 6
    assert told[True] > 0


WRITERS = 8

WRITE = """
import sys, os, time, json
from ckpt.errors import CkptError
from ckpt.keeper.client import KeeperClient
from ckpt.run import Run
from tests.keeper.rank_process import stage
url, go, mine, step = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
run = Run.open(url)
with KeeperClient.connect(0) as client:
    print("ready", flush=True)
    while not os.path.exists(go):
        time.sleep(0.001)
    writer = run.open_writer(job=f"job {mine}", world=1, resumed_from=None)
    try:
        result = stage(client, url, step, 1, writer=writer.number, nbytes=100_000 + mine).wait(60)
        print(json.dumps([writer.number, "committed", result.attempt]))
    except CkptError as error:
        print(json.dumps([writer.number, type(error).__name__, str(error)]))
"""


@pytest.mark.parametrize("different", [False, True], ids=["of-one-step", "of-different-steps"])
def test_eight_writers_at_once(folder: Path, tmp_path: Path, different: bool) -> None:
    """Eight jobs that know nothing of each other: the last to open the run has it, each other one is told who does."""
    url, go = tmp_path / "run", tmp_path / "go"
    steps = [10 + (i if different else 0) for i in range(WRITERS)]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, str(url), str(go), str(i), str(step)], stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env={**os.environ, "CKPT_JOB": uuid.uuid4().hex},
        )
        for i, step in enumerate(steps)
    ]  # fmt: skip
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
    go.touch()
    outcomes = [json.loads(job.communicate(timeout=60)[0]) for job in jobs]
    assert sorted(number for number, _, _ in outcomes) == list(range(1, WRITERS + 1))
    run = Run.open(url)
    mine = {number: i for i, (number, _, _) in enumerate(outcomes)}
    for number, end, text in outcomes:
        if end != "committed":
            assert end == FencedError.__name__, text
            assert "holds the run: job " in text
        state = run.survey().states.get(Attempt(steps[mine[number]], number, 1), ("", ""))[0]
        assert state in ({"live", "superseded", "abandoned"} if end == "committed" else {"", "abandoned"}), text
    newest = max(outcomes)
    assert newest[1] == "committed"
    assert committed(url) == [steps[mine[WRITERS]]]
    assert run.find().attempt.writer == WRITERS
    for state in run.survey().steps:
        if state.commit is None:
            continue
        owner = mine[state.attempt.writer]
        part = run.part(state.attempt, state.commit, 0)
        stored = (Path(run.url) / state.attempt.folder / part.files[0].name).read_bytes()
        assert stored[part.files[0].header_nbytes :] == payload(steps[owner], 0, 100_000 + owner)
    assert all(report.ok for report in verify_all(run))
    prune(run, not_live=True, grace_s=0)
    assert folders(run.url) == [run.find().attempt.folder]


def test_a_writer_that_opens_while_another_does(tmp_path: Path) -> None:
    """At every operation of one's opening another opens the run: each has its own number, the later holds the run."""
    counted, operations = meeting(tmp_path / "counted")
    counted.open_writer(job="a", world=1, resumed_from=None)
    for at in range(len(operations)):
        url = tmp_path / f"at-{at}"
        others: list[Writer] = []

        def come(url: Path = url, others: list[Writer] = others) -> None:
            others.append(Run.open(url).open_writer(job="b", world=1, resumed_from=None))

        slow, _ = meeting(url, at, come)
        mine = slow.open_writer(job="a", world=1, resumed_from=None)
        assert sorted([mine.number, others[0].number]) == [1, 2], operations[at]
        older, newer = sorted([mine, others[0]], key=lambda writer: writer.number)
        assert newer.job == "a"  # it took the next number when its own was gone
        with pytest.raises(FencedError, match="writer 2 holds the run: a, host"):
            Run.open(url).check_not_fenced(older.number)
        Run.open(url).check_not_fenced(newer.number)
