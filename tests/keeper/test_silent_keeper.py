"""A keeper that lives and does nothing: whoever waits for it is told in time, and the job goes on with another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine import job
from ckpt.keeper import client as client_module
from ckpt.processes import ALIVE, STOPPED, condition
from tests.crash.jobs import Gate
from tests.keeper.conftest import is_alive, wait_for

TIMEOUT_S = 1.5  # instead of 30


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter time-outs."""
    monkeypatch.setattr(client_module, "KEEPER_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(client_module, "_ASK_S", 0.5)


def waits_for_a_commit(run: str, _monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Something that waits for the keeper: the result of a save."""
    return ckpt.save(run, 2, {"w": torch.ones(100)}).result


def waits_for_an_arena(run: str, _monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The same: a third save, for which there is no memory while the first two are written."""
    for step in (2, 3):
        ckpt.save(run, step, {"w": torch.ones(100)})
    return lambda: ckpt.save(run, 4, {"w": torch.ones(100)})


@pytest.mark.parametrize("seen", [True, False], ids=["seen to be stopped", "not answering"])
@pytest.mark.parametrize("waits", [waits_for_a_commit, waits_for_an_arena])
def test_a_keeper_that_does_nothing(
    tmp_path: Path,
    folder: Path,
    hurried: None,
    monkeypatch: pytest.MonkeyPatch,
    waits: Callable[[str, pytest.MonkeyPatch], Callable[[], object]],
    seen: bool,
):
    """KeeperError after the time-out, naming it; the next save starts another one when it is gone."""
    job.leave()  # an earlier test of this process may have a keeper, which knows nothing of this environment
    gate = Gate(tmp_path, "create", "step-00000002-*/COMMIT")
    for name, value in gate.env.items():
        monkeypatch.setenv(name, value)
    run = str(tmp_path / "run")
    ckpt.save(run, 1, {"w": torch.ones(100)}, wait=True)
    keeper = job.keeper_client(0).keeper_pid
    wait = waits(run, monkeypatch)
    gate.reached()
    if not seen:
        monkeypatch.setattr(client_module, "condition", lambda _pid: ALIVE)
        monkeypatch.setattr("ckpt.keeper.settle.ATTACH_TIMEOUT_S", 0.3)
        monkeypatch.setattr("ckpt.keeper.start.ATTACH_TIMEOUT_S", 0.3)
    os.kill(keeper, signal.SIGSTOP)
    try:
        wait_for(lambda: condition(keeper) == STOPPED, "the keeper is stopped")
        started = time.monotonic()
        with pytest.raises(ckpt.KeeperError, match=rf"the keeper \(pid {keeper}\) .*has not answered for 1.5 s"):
            wait()
        assert time.monotonic() - started < TIMEOUT_S + 8.0
    finally:
        os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not is_alive(keeper), "it is gone")
    gate.open()
    for _ in range(3):  # what was lost with it and was not told is raised once
        try:
            ckpt.save(run, 5, {"w": torch.ones(100)}, wait=True)
            break
        except ckpt.KeeperError:
            continue
    assert ckpt.latest(run) == 5
    job.leave()
