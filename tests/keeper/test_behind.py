"""Writing behind the copy: what the watermark lets the keeper write, and copies that never come to their end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, CkptError, KeeperError, RankError, StoreError
from ckpt.format.commit import Attempt
from ckpt.keeper.client import KeeperClient, statuses
from ckpt.testing import store_env
from tests.keeper.conftest import Trainer, TrainerError, wait_for
from tests.keeper.rank_process import fill, hand_over, stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]
NBYTES = 40 << 20
HALF = 20 << 20


def written() -> int:
    """Bytes that the only keeper has written of its only save."""
    return sum(rank.nbytes_written for status in statuses() for save in status.saves for rank in save.ranks)


def arena_states() -> list[str]:
    """Of the only keeper's arenas."""
    return [arena.state for status in statuses() for arena in status.arenas]


def stored_nbytes(url: str) -> int:
    """Bytes in the only data file there is."""
    return sum(path.stat().st_size for path in Path(url).glob("step-*/*.safetensors"))


def test_the_keeper_writes_behind_the_copy(folder: Path, url: str):
    """Blocks below the watermark are written before the copy ends; nothing is staged, nothing above it is read."""
    with KeeperClient.connect(0) as client:
        arena, task = fill(client, url, 1, 1, nbytes=NBYTES)
        final = bytes(arena.view[HALF:])
        arena.view[HALF:] = b"\xee" * len(final)
        pending = client.begin(task)
        pending.ready(HALF)
        wait_for(lambda: stored_nbytes(url) == 16 << 20, "the first two blocks are written")
        assert (pending.staged, pending.done, committed(url), arena_states()) == (False, False, [], ["filling"])
        arena.view[HALF:] = final
        pending.ready(pending.end)
        pending.wait_staged(30)
        pending.wait(30)
    check_step(url, 1)


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_digests_are_those_of_the_final_bytes(folder: Path, url: str, encode: str):
    """However small the watermark's steps, each chunk is digested, encoded and written only when it is whole."""
    with KeeperClient.connect(0) as client:
        arena, task = fill(client, url, 1, 1, nbytes=600_000 if encode == "zstd" else NBYTES, encode=encode)
        final = bytes(arena.view)
        arena.view[:] = b"\xee" * len(final)
        pending = client.begin(task)
        for start in range(0, pending.end, pending.end // 37):
            stop = min(pending.end, start + pending.end // 37)
            arena.view[start:stop] = final[start:stop]
            pending.ready(stop)
        pending.wait(30)
    check_step(url, 1)


def test_a_snapshot_without_bytes_is_staged_by_its_watermark_too(folder: Path, url: str):
    """Nothing to copy: one watermark at 0 stages it."""
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1, nbytes=0, encode="zstd")
        pending = client.begin(task)
        with pytest.raises(TimeoutError):
            pending.wait_staged(0.05)
        pending.ready(0)
        pending.wait(30)
        assert arena_states() == ["free"]


def test_a_trainer_killed_in_the_middle_of_the_copy(trainers: Trainers, url: str):
    """The peer is told who died, nothing is committed or left, and the restarted job saves with the same arenas."""
    first, second = trainers(0), trainers(1)
    first.save(1, world=2, nbytes=NBYTES, progress_timeout_s=3600)
    second.do("begin", run=url, step=1, save=1, world=2, nbytes=NBYTES, ready=HALF)
    wait_for(lambda: written() > NBYTES, "its first blocks are written")
    second.kill()
    with pytest.raises(TrainerError, match=rf"rank 1 \(process {second.pid}\) died before its snapshot") as caught:
        first.wait(1)
    assert caught.value.kind == "RankError"
    assert (committed(url), folders(url)) == ([], [])
    wait_for(lambda: set(arena_states()) == {"free"}, "all arenas are free")
    again = trainers(1)
    for rank in (first, again):
        rank.save(1, save=2, world=2, nbytes=NBYTES)
    for rank in (first, again):
        rank.wait(2)
    check_step(url, 1, world=2)


def test_a_copy_that_is_abandoned(trainers: Trainers, url: str):
    """Both ranks hear at once why; the arena is free again, and the next save of the same processes works."""
    first, second = trainers(0), trainers(1)
    first.save(1, world=2, nbytes=NBYTES, progress_timeout_s=3600)
    second.do("begin", run=url, step=1, save=1, world=2, nbytes=NBYTES, ready=HALF)
    second.do("abandon", run=url, step=1, save=1, world=2, message="ValueError: no")
    for rank in (first, second):
        with pytest.raises(TrainerError, match="rank 1: ValueError: no") as caught:
            rank.wait(1)
        assert caught.value.kind == "RankError"
    assert folders(url) == []
    wait_for(lambda: set(arena_states()) == {"free"}, "all arenas are free")
    for rank in (first, second):
        rank.save(1, save=2, world=2)
    for rank in (first, second):
        rank.wait(2)
    check_step(url, 1, world=2)


def test_a_client_that_leaves_in_the_middle_of_the_copy(trainers: Trainers, url: str):
    """Bye is no way to end a copy: the peer hears that the rank has left."""
    first, second = trainers(0), trainers(1)
    first.save(1, world=2, progress_timeout_s=3600)
    second.do("begin", run=url, step=1, save=1, world=2, ready=100)
    second.do("close")
    with pytest.raises(TrainerError, match=rf"rank 1 \(process {second.pid}\) left before its snapshot was staged"):
        first.wait(1)
    assert folders(url) == []


def test_an_arena_that_is_released_in_the_middle_of_the_copy(folder: Path, url: str):
    """Releasing it gives the snapshot up."""
    with KeeperClient.connect(0) as client:
        arena, task = fill(client, url, 1, 1)
        pending = client.begin(task)
        client.release(arena)
        with pytest.raises(RankError, match="rank 0 gave its snapshot up"):
            pending.wait(30)
        wait_for(lambda: arena_states() == ["free"], "the arena is free")
        stage(client, url, 2, 2).wait(30)
    assert folders(url) == ["step-00000002-w1.2"]


@pytest.mark.parametrize(("marks", "at"), [((2000, 1000), 1000), ((-1,), -1), ((1 << 40,), 1 << 40)])
def test_a_watermark_that_makes_no_sense_is_refused(folder: Path, url: str, marks: tuple[int, ...], at: int):
    """Backwards, negative or past the end: the save fails, whatever comes then, and the next one works."""
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1)
        pending = client.begin(task)
        for mark in marks:
            pending.ready(mark)
        pending.ready(pending.end)
        with pytest.raises(BadInputError, match=rf"rank 0 says that {at:,} bytes of its arena are final"):
            pending.wait(30)
        assert not pending.staged
        wait_for(lambda: arena_states() == ["free"], "the arena is free")
        stage(client, url, 2, 2).wait(30)
    assert folders(url) == ["step-00000002-w1.2"]


def test_a_write_that_fails_before_the_copy_has_ended(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """The error is there before the copy ends; the arena is lent again only when the trainer is done with it."""
    env = store_env({"wrap": "faulty", "program": "keeper", "operation": "write", "on_nth": 1, "errno": "ENOSPC"})
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1, nbytes=NBYTES)
        pending = client.begin(task)
        pending.ready(HALF)
        with pytest.raises(StoreError, match="no space left"):
            pending.wait(30)
        assert folders(url) == []
        assert arena_states() == ["filling"]
        pending.ready(pending.end)
        wait_for(lambda: arena_states() == ["free"], "the arena is free")
        assert not pending.staged
        stage(client, url, 1, 2, nbytes=NBYTES).wait(30)
    check_step(url, 1)


def test_a_refused_task_keeps_its_arena_until_the_copy_ends(folder: Path, url: str):
    """What the trainer still copies into is lent to nobody else."""
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1)
        hand_over(client, task).wait(30)
        arena, task = fill(client, url, 1, 1)
        pending = client.begin(task)
        with pytest.raises(BadInputError, match="already"):
            pending.wait(30)
        assert sorted(arena_states()) == ["filling", "free"]
        assert client.arena(10, url).id != arena.id
        pending.ready(pending.end)
        assert client.arena(10, url).id == arena.id


def test_a_keeper_killed_in_the_middle_of_the_copy(folder: Path, url: str):
    """Announcing goes on in silence, ``wait`` tells, and the job's next keeper saves the step."""
    client = KeeperClient.connect(0)
    _, task = fill(client, url, 1, 1, nbytes=NBYTES)
    pending = client.begin(task)
    pending.ready(HALF)
    wait_for(lambda: stored_nbytes(url) > 0, "a block is written")
    os.kill(client.keeper_pid, signal.SIGKILL)
    wait_for(lambda: pending.done, "the client has noticed")
    pending.ready(HALF + 1)
    pending.ready(pending.end)
    with pytest.raises(KeeperError, match="is gone"):
        pending.wait(30)
    client.abandon(url, Attempt(1, 1, 1), 0, 1, "never raises")
    client.close()
    with KeeperClient.connect(0) as again:
        stage(again, url, 1, 2, nbytes=NBYTES).wait(30)
    check_step(url, 1)


def test_a_copy_that_stands_still(folder: Path, url: str):
    """A watermark that does not move for too long fails the save, and the message says where it stands."""
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1, progress_timeout_s=0.5)
        pending = client.begin(task)
        pending.ready(5000)
        with pytest.raises(CkptError, match=r"rank 0 of 1 \(rank 0 .* its trainer has copied 5,000\)"):
            pending.wait(30)
        pending.ready(pending.end)
    assert folders(url) == []


def test_warming_touches_both_arenas_and_holds_up_nobody(folder: Path, url: str):
    """The memory is there before anyone asks for it, a save meanwhile is served, and it happens once."""
    with KeeperClient.connect(0) as client:
        client.warm(NBYTES, url)
        stage(client, url, 1, 1, nbytes=NBYTES).wait(30)
        wait_for(lambda: not client.is_warming, "it has made way for the save, or is through")
        client.warm(NBYTES, url)
        wait_for(lambda: client.held_nbytes(url) >= 2 * NBYTES, "both are touched")
        wait_for(lambda: arena_states() == ["free", "free"], "both are given back")
        wait_for(lambda: not client.is_warming, "it is through")
        threads = threading.active_count()
        client.warm(NBYTES, url)
        assert threading.active_count() == threads
    check_step(url, 1)


def test_warming_never_raises(folder: Path, url: str):
    """What the node does not have is told to who asks for an arena."""
    with KeeperClient.connect(0) as client:
        client.warm(1 << 50, url)
        stage(client, url, 1, 1).wait(30)
    client.warm(100, url)
    check_step(url, 1)
