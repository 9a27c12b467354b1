"""Clocks that jump by years, in trainer and keeper, between saves and during them: order and liveness know no clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.retention import prune
from ckpt.keeper import retention
from ckpt.keeper.retention import Known
from ckpt.run import Run
from ckpt.testing import store_env
from tests.concurrency.interleave import folders, retain, save
from tests.keeper.conftest import wait_for
from tests.ranks import run_ranks

YEAR_S = 365 * 86_400.0

# Python runs this in every process that has its folder on the path: the clock is off by what a file says, now.
JUMPING = """
import time, pathlib
_clock, _file = time.time, pathlib.Path({file!r})
time.time = lambda: _clock() + float(_file.read_text())
"""


def save_while_clocks_jump(rank: int, world: int, run: str, folder: Path, jumps: list[float]) -> list[int]:
    """Two jobs after each other, retention after each save, and a jump before each and in the middle of each."""
    file, release, waiting = folder / "jump", folder / "release", folder / "waiting"
    exec(JUMPING.format(file=str(file)), {})
    steps = []
    numbers = iter(range(1, 100))
    for half in (jumps[: len(jumps) // 2], jumps[len(jumps) // 2 :]):
        state = {"w": torch.zeros(1000)}
        with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=2)) as checkpointer:
            if steps:
                assert checkpointer.restored_step == steps[-1]
            for jump in half:
                step = next(numbers)
                file.write_text(str(jump))
                state["w"].fill_(step)
                release.unlink(missing_ok=True)
                waiting.unlink(missing_ok=True)
                pending = checkpointer.save(step)
                wait_for(waiting.exists, "the keeper stands before COMMIT")
                file.write_text(str(-jump))
                release.touch()
                pending.result(20)
                steps.append(step)
                assert ckpt.steps(run) == steps[-2:]
        checkpointer._session.writer = None  # as a job of its own would begin
    return steps


def test_clocks_that_jump_between_and_during_saves(tmp_path: Path) -> None:
    """By years, back and ahead: each save is the newest, the two last stay, nothing waits, nothing is cut short."""
    run, file = tmp_path / "run", tmp_path / "jump"
    file.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(JUMPING.format(file=str(file)))
    held = {"wrap": "blocking", "program": "keeper", "operation": "create", "match": "COMMIT"}
    env = store_env({**held, "release": tmp_path / "release", "waiting": tmp_path / "waiting"})
    jumps = [0.0, 5 * YEAR_S, -20 * YEAR_S, 30 * YEAR_S, -1.0, 1 * YEAR_S]
    started = time.monotonic()
    arguments = (str(run), tmp_path, jumps)
    steps = run_ranks(
        1, save_while_clocks_jump, *arguments, env={**env, "PYTHONPATH": str(tmp_path)}, process_group=False
    )[0]
    assert time.monotonic() - started < 100  # no wait had anything to do with these years
    assert steps == [1, 2, 3, 4, 5, 6]
    assert ckpt.steps(run) == [5, 6]
    found = Run.open(run).survey()
    stamps = [state.commit.created_unix_s for state in found.live if state.commit is not None]
    assert abs(stamps[1] - stamps[0]) > YEAR_S / 2, "the clocks did jump"
    assert torch.equal(ckpt.read(run)["w"], torch.full((1000,), 6.0))
    assert all(ckpt.verify(run, step).ok for step in (5, 6))


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, 10 * YEAR_S], ids=["back", "ahead"])
def test_prunes_grace_goes_by_the_clock(tmp_path: Path, jump_s: float) -> None:
    """Ahead: debris goes at once; back: it stays. Neither makes a step go, or what may be under way."""
    url = tmp_path / "run"
    save(url, 1, 2)
    run = Run.open(url)
    run.open_writer(job="again", world=1, resumed_from=2)
    for name in ("step-00000003-w1.3", "step-00000003-w2.1"):
        (url / name).mkdir()
        (url / name / "state-00000-of-00001.safetensors").write_bytes(b"x")
    prune(url, now_unix_s=time.time() + jump_s)
    assert ((url / "step-00000003-w1.3").exists()) == (jump_s < 0)
    assert (url / "step-00000003-w2.1").exists()
    assert ckpt.steps(url) == [1, 2]
    prune(url, keep_last=1, now_unix_s=time.time() + jump_s)
    assert ckpt.steps(url) == [2]


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, 10 * YEAR_S], ids=["back", "ahead"])
def test_retention_knows_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """It goes by numbers, and counts its own hours."""
    url = tmp_path / "run"
    known = Known()
    clock = time.time
    for step in range(1, 6):
        save(url, step)
        monkeypatch.setattr(retention.time, "time", lambda step=step: clock() + jump_s * step)
        assert retain(Run.open(url), 2, known) == []
    assert folders(url) == ["step-00000004-w1.4", "step-00000005-w1.5"]
