"""Stores that fail under the keeper: the trainer learns why, nothing counts, nothing is left, the next save works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CkptError, KeeperError, SaveFailedError, StoreError
from ckpt.keeper.client import KeeperClient, settle, statuses
from ckpt.testing import store_env
from tests.keeper.conftest import Trainer, TrainerError, is_alive, wait_for
from tests.keeper.rank_process import stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts wrappers on the stores of the keepers that are started from now on."""

    def put_on(**spec: Any) -> None:
        for name, value in store_env({"program": "keeper", **spec}).items():
            monkeypatch.setenv(name, value)

    return put_on


@pytest.mark.parametrize(
    "fault",
    [
        {"operation": "open_sink", "on_nth": 2},
        {"operation": "write", "match": "*.safetensors", "on_nth": 4, "after_nbytes": 1000},
        {"operation": "close", "on_nth": 2},
        {"operation": "create", "match": "*/part-*", "on_nth": 2},
        {"operation": "create", "match": "*/part-*", "on_nth": 2, "after": True},
        {"operation": "create", "match": "*/COMMIT", "on_nth": 2},
        {"operation": "create", "match": "layouts/*", "on_nth": 2},
    ],
)
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
def test_a_store_that_fails_once(folder: Path, url: str, faulty: Callable[..., None], fault: dict[str, Any], code: str):
    """Wherever the second save fails: its error names cause and step, the first step stays, and a third save works."""
    faulty(wrap="faulty", errno=code, **fault)
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1, nbytes=20 << 20).wait(30)
        pending = stage(client, url, 2, 2, nbytes=20 << 20)
        with pytest.raises(StoreError, match=r"save of step 2 \(w1\.2\) failed: .*" + url):
            pending.wait(30)
        assert committed(url) == [1]
        assert folders(url) == ["step-00000001-w1.1"]
        stage(client, url, 2, 3, nbytes=20 << 20).wait(30)
    assert committed(url) == [1, 2]
    check_step(url, 2)


def test_a_commit_whose_answer_is_lost(folder: Path, url: str, faulty: Callable[..., None]):
    """COMMIT was created although the store said otherwise: the save has failed, and the step is not torn down."""
    faulty(wrap="faulty", operation="create", match="*/COMMIT", errno="EIO", after=True)
    with KeeperClient.connect(0) as client, pytest.raises(StoreError):
        stage(client, url, 1, 1).wait(30)
    check_step(url, 1)


def test_one_rank_of_two_fails(trainers: Trainers, url: str):
    """The other one is told which, and why; both go on with the next save."""
    env = store_env({"wrap": "faulty", "program": "keeper", "match": "*/model-00001-*", "operation": "write",
                     "on_nth": 1, "errno": "ENOSPC"})  # fmt: skip
    ranks = [trainers(0, **env), trainers(1)]
    for rank in ranks:
        rank.hand_over(1, world=2, nbytes=20 << 20)
    with pytest.raises(TrainerError, match=r"rank 1: StoreError: .*no space left"):
        ranks[0].wait(1)
    with pytest.raises(TrainerError, match="no space left") as caught:
        ranks[1].wait(1)
    assert caught.value.kind == "StoreError"
    assert folders(url) == []
    for rank in ranks:
        rank.save(1, save=2, world=2)
    for rank in ranks:
        rank.wait(2)
    check_step(url, 1, world=2)


def test_a_store_that_no_keeper_can_open(folder: Path):
    """A URL without a store is told as such."""
    with KeeperClient.connect(0) as client:
        pending = stage(client, "nowhere://bucket/run", 1, 1)
        with pytest.raises(CkptError, match="nowhere"):
            pending.wait(30)


def test_what_nobody_expected_is_told_too(folder: Path, url: str, faulty: Callable[..., None]):
    """An exception that is no CkptError reaches the client, leaves a traceback in the log, and the keeper goes on."""
    faulty(wrap="crash", how="raise", operation="create", match="*/part-*", at=0)
    with KeeperClient.connect(0) as client:
        with pytest.raises(KeeperError, match="unexpected Crash in the keeper"):
            stage(client, url, 1, 1).wait(30)
        assert is_alive(client.keeper_pid)
    assert "Traceback" in "".join(path.read_text() for path in folder.glob("*.log"))


def test_a_hanging_store_fails_the_save_and_not_the_trainer(
    folder: Path, url: str, tmp_path: Path, faulty: Callable[..., None]
):
    """A write that does not return: the save fails and says how far it got; other saves are not harmed."""
    release, other = tmp_path / "release", str(tmp_path / "other")
    faulty(wrap="blocking", match="step-00000001-*/model-*", operation="write", release=release)
    with KeeperClient.connect(0) as client:
        pending = stage(client, url, 1, 1, progress_timeout_s=0.5)
        pending.wait_staged(30)
        stage(client, other, 2, 1).wait(30)
        (text,) = settle(url, timeout_s=0.05)
        assert "step 1 (w1.1) in keeper" in text
        assert "waits for rank 0" in text
        wait_for(lambda: statuses()[0].saves[0].failure, "the save has failed")
        assert not pending.done, "it is told when what it has written is removed"
        release.touch()
        with pytest.raises(
            SaveFailedError, match=r"no progress for 0\.5 s: no part from rank 0 of 1 \(rank 0 has written 0 of"
        ):
            pending.wait(30)
        assert folders(url) == []
        stage(client, url, 3, 3).wait(30)
    assert committed(url) == [3]


def test_killed_while_writing(trainers: Trainers, url: str, tmp_path: Path):
    """A keeper killed in the middle of a file leaves no step; the job's next keeper saves the step anew."""
    env = store_env({"wrap": "crash", "program": "keeper", "operation": "write", "at": 1})
    rank = trainers(0, **env)
    rank.hand_over(1, nbytes=40 << 20)
    with pytest.raises(TrainerError, match="is gone"):
        rank.wait(1)
    assert committed(url) == []
    again = trainers(0)
    again.save(1, save=2, nbytes=40 << 20)
    again.wait(2)
    check_step(url, 1)
