"""Stores that fail under the keeper: the trainer learns why, nothing counts, nothing is left, the next save works."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CkptError, KeeperError, SaveFailedError, StoreError
from ckpt.keeper.client import KeeperClient, settle, statuses
from ckpt.keeper.lanes import LEFT_BEHIND
from ckpt.testing import store_env
from tests.keeper.conftest import Trainer, TrainerError, is_alive, wait_for
from tests.keeper.rank_process import stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts wrappers on the stores of the keepers that are started from now on."""

    def put_on(**spec: Any) -> None:
        for name, value in store_env({"program": "ckpt.keeper", **spec}).items():
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
        pending = stage(client, url, 1, 1, progress_timeout_s=1.0)
        pending.wait_staged(30)
        stage(client, other, 2, 1).wait(30)
        (text,) = settle(url, timeout_s=0.05)
        assert "step 1 (w1.1) in keeper" in text
        assert "waits for rank 0" in text
        with pytest.raises(
            SaveFailedError,
            match=r"no progress for 1 s: no part from rank 0 of 1 \(rank 0 has written 0 of [\d,]+ bytes; "
            r"its `write` of /.*/run/step-00000001-w1\.1/model-\S+ has not returned for \d",
        ):
            pending.wait(30)
        stage(client, url, 3, 3).wait(30)
        assert [arena.state for arena in statuses()[0].arenas if arena.run == url] == ["stuck", "free"]
        release.touch()
        wait_for(lambda: folders(url) == ["step-00000003-w1.3"], "the write has returned and removed its file")
        wait_for(lambda: {arena.state for arena in statuses()[0].arenas} == {"free"}, "its arena is free")
        stage(client, url, 4, 4).wait(30)
    assert committed(url) == [3, 4]


@pytest.mark.parametrize(
    ("operation", "match"),
    [("create", "step-00000001-*/COMMIT"), ("create", "layouts/*"), ("list", "writers"),
     ("open_sink", "step-00000001-*"), ("close", "step-00000001-*"), ("create", "step-00000001-*/part-*")],
)  # fmt: skip
def test_any_request_that_hangs_fails_its_save_only(
    folder: Path, url: str, tmp_path: Path, faulty: Callable[..., None], operation: str, match: str
):
    """Whatever does not return: its save fails in time and names it, the next one is made, the keeper can end."""
    release, waiting = tmp_path / "release", tmp_path / "waiting"
    faulty(wrap="blocking", match=match, operation=operation, release=release, waiting=waiting, on_nth=1)
    with KeeperClient.connect(0) as client:
        pending = stage(client, url, 1, 1, progress_timeout_s=0.5)
        with pytest.raises(CkptError, match=r"has not returned for \d") as caught:
            pending.wait(10)
        assert isinstance(caught.value, (StoreError, SaveFailedError))
        stage(client, url, 2, 2, progress_timeout_s=0.5).wait(10)
        assert committed(url) == [2]
        release.touch()
        late = [1] if match.endswith("COMMIT") else []  # the message says so
        assert ("the step may still appear" in str(caught.value)) == bool(late)
        wait_for(lambda: committed(url) == [*late, 2], "the step that was in doubt is there")
        wait_for(lambda: len(folders(url)) == 1 + len(late), "what was left is removed when the request returns")
        stage(client, url, 3, 3).wait(10)
    for step in (*late, 2, 3):
        check_step(url, step)


def test_hung_requests_do_not_pile_up(folder: Path, url: str, tmp_path: Path, faulty: Callable[..., None]):
    """After some that hang, saves fail at once and say why; when they return the next save is made."""
    release = tmp_path / "release"
    faulty(wrap="blocking", match="COMMIT", operation="create", release=release)
    with KeeperClient.connect(0) as client:
        for step in range(1, LEFT_BEHIND + 1):
            with pytest.raises(StoreError, match=r"`create` of .*COMMIT has not returned"):
                stage(client, url, step, step, progress_timeout_s=0.2).wait(10)
        for step in (7, 8):
            with pytest.raises(StoreError, match=rf"{LEFT_BEHIND} requests have not returned, among them `create`"):
                stage(client, url, step, step, progress_timeout_s=60).wait(10)
        assert committed(url) == []
        release.touch()
        wait_for(lambda: committed(url) == [1, 2, 3, 4], "they have returned")
        wait_for(lambda: _tried(client, url), "saves are made again")
    assert committed(url)[:4] == [1, 2, 3, 4]
    wait_for(lambda: len(folders(url)) == len(committed(url)), "nothing else is left")


_numbers = itertools.count(10)


def _tried(client: KeeperClient, url: str) -> bool:
    number = next(_numbers)
    with contextlib.suppress(StoreError):
        stage(client, url, number, number).wait(10)
        return True
    return False


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
