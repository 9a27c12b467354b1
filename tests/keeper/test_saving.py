"""Saves through a real keeper by real trainer processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, KeeperError
from ckpt.format.commit import Attempt
from ckpt.keeper.client import KeeperClient, statuses
from tests.keeper.conftest import Trainer, is_alive, wait_for
from tests.keeper.rank_process import fill, hand_over, stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]


def test_a_save_becomes_a_step(folder: Path, url: str):
    """One rank's snapshot is durable, committed and readable, and the answer says what it cost."""
    with KeeperClient.connect(0) as client:
        pending = stage(client, url, 5, 1, nbytes=40 << 20)
        result = pending.wait(60)
    assert (result.step, result.attempt, result.warnings) == (5, "w1.1", ())
    assert result.nbytes_written > 40 << 20
    assert 0 < result.write_s <= result.commit_s
    assert (pending.staged, pending.done, pending.error) == (True, True, None)
    check_step(url, 5)


def test_ranks_of_a_node_share_a_keeper(trainers: Trainers, url: str):
    """Three processes of one job save one step through one keeper."""
    ranks = [trainers(rank) for rank in range(3)]
    assert len({rank.keeper_pid for rank in ranks}) == 1
    for step in (1, 2, 3):
        for rank in ranks:
            rank.save(step, world=3)
    for rank in ranks:
        assert [rank.wait(step)["step"] for step in (1, 2, 3)] == [1, 2, 3]
    for step in (1, 2, 3):
        check_step(url, step, world=3)


def test_packs(folder: Path, url: str):
    """``encode="zstd"`` writes packs that decode to the same bytes, and the step says that it needs that feature."""
    with KeeperClient.connect(0) as client:
        result = stage(client, url, 1, 1, encode="zstd", nbytes=100_000).wait(60)
    assert result.nbytes_written < 10_000
    check_step(url, 1)


def test_two_runs_in_one_keeper(folder: Path, url: str, tmp_path: Path):
    """A keeper serves every run of its job, each with two arenas of its own."""
    other = str(tmp_path / "other")
    with KeeperClient.connect(0) as client:
        held = [fill(client, run, 1, 1)[1] for run in (url, other, url, other)]
        assert len({task.arena for task in held}) == 4
        for task in held[:2]:
            hand_over(client, task).wait(60)
    assert committed(url) == [1]
    check_step(url, 1)
    assert folders(other) == ["step-00000001-w1.1"]


def test_arenas_alternate(folder: Path, url: str):
    """One arena is filled while the other one is whole; a third request waits until one is durable."""
    with KeeperClient.connect(0) as client:
        first, task = fill(client, url, 1, 1)
        second = client.arena(10, url)
        assert second.id != first.id
        with pytest.raises(TimeoutError, match="both arenas of rank 0"):
            client.arena(10, url, timeout_s=0.05)
        client.release(second)
        assert client.arena(10, url).id == second.id
        hand_over(client, task).wait(60)
        third = client.arena(10, url)
        assert third.id == first.id
        assert bytes(third.view[:8]) == bytes(first.view[:8])


def test_an_arena_grows(folder: Path, url: str):
    """A larger snapshot gets the same arena, grown; what was mapped before stays good."""
    with KeeperClient.connect(0) as client:
        small = client.arena(100, url)
        small.view[:4] = b"kept"
        client.release(small)
        client.release(client.arena(100, url))
        large = client.arena(5 << 20, url)
        assert (large.id, large.nbytes, len(large.view)) == (small.id, 5 << 20, 5 << 20)
        large.view[-1] = 1
        assert bytes(small.view[:4]) == bytes(large.view[:4]) == b"kept"


def test_an_arena_larger_than_memory_is_refused(folder: Path, url: str):
    """The node's memory is looked at before it is taken, and the error says what there is."""
    with KeeperClient.connect(0) as client:
        with pytest.raises(KeeperError, match=r"no memory for the snapshot of rank 0: it needs .* available"):
            client.arena(1 << 50, url)
        stage(client, url, 1, 1).wait(60)


def test_an_empty_rank(folder: Path, url: str):
    """A rank that owns no bytes writes a part and no file."""
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1)
        arena = client.arena(0, url)
        pending = hand_over(client, type(task)(**{**{f: getattr(task, f) for f in task.__struct_fields__},
                                               "arena": arena.id, "files": ()}))  # fmt: skip
        pending.wait(60)
    assert sorted(os.listdir(Path(url, "step-00000001-w1.1"))) == ["COMMIT", "part-00000-of-00001.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arena": 99}, "arena 99 is not lent"),
        ({"rank": 1}, "no such rank"),
        ({"encode": "lzma"}, "encode 'lzma'"),
        ({"files": "outside"}, "outside of the arena"),
        ({"files": "../../evil"}, r"a file called '\.\./\.\./evil'"),
        ({"files": "sum"}, "header and shards make"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(folder: Path, url: str, change: dict, message: str):
    """A task is checked before a byte of it is written, and the next one is taken."""
    import msgspec

    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1)
        (file,) = task.files
        match change.get("files"):
            case "outside":
                change = {"files": (msgspec.structs.replace(file, arena_offset=1 << 30),)}
            case "sum":
                change = {"files": (msgspec.structs.replace(file, nbytes=file.nbytes - 1),)}
            case str(name):
                change = {"files": (msgspec.structs.replace(file, name=name),)}
        pending = hand_over(client, msgspec.structs.replace(task, **change))
        with pytest.raises(BadInputError, match=message):
            pending.wait(60)
        assert not pending.staged
        with pytest.raises(BadInputError, match=message):
            pending.wait_staged(1)
        stage(client, url, 2, 2).wait(60)
    assert folders(url) == ["step-00000002-w1.2"]


def test_the_same_attempt_twice(folder: Path, url: str):
    """A rank stages an attempt once; the second try is refused and harms nothing."""
    with KeeperClient.connect(0) as client:
        first = stage(client, url, 1, 1)
        second = stage(client, url, 1, 1)
        first.wait(60)
        with pytest.raises(BadInputError, match="already"):
            second.wait(60)
    check_step(url, 1)


def test_status(folder: Path, url: str):
    """``statuses`` tells who is connected, which arenas there are, and what is under way."""
    with KeeperClient.connect(0) as client:
        task = fill(client, url, 1, 1, world=2)[1]
        hand_over(client, task).wait_staged(30)
        wait_for(lambda: statuses()[0].saves[0].ranks[0].state == "durable", "rank 0 is durable")
        (status,) = statuses()
        assert (status.pid, [(c.rank, c.pid) for c in status.clients]) == (client.keeper_pid, [(0, os.getpid())])
        (save,) = status.saves
        assert (save.run, save.step, save.attempt, save.world, save.missing) == (url, 1, "w1.1", 2, (1,))
        assert [(a.run, a.rank, a.state) for a in status.arenas] == [(url, 0, "free")]
        assert status.log.endswith(".log")
        with KeeperClient.connect(1) as other:
            other.abandon(url, Attempt(1, 1, 1), 1, 2, "test")
    wait_for(lambda: not is_alive(status.pid), "the keeper is gone")
    assert statuses() == []


def test_runs_that_are_done_keep_nothing(folder: Path, tmp_path: Path):
    """A process that saves to one run after the other does not gather arenas, threads and descriptors in the keeper."""
    with KeeperClient.connect(0) as stays:
        proc = f"/proc/{stays.keeper_pid}"
        idle = len(os.listdir(f"{proc}/fd"))
        for number in range(12):
            with KeeperClient.connect(0) as client:
                stage(client, str(tmp_path / f"run-{number}"), 1, 1)
        wait_for(lambda: statuses()[0].arenas == statuses()[0].saves == (), "arenas and saves are gone")
        wait_for(lambda: len(os.listdir(f"{proc}/task")) == 1, "threads are gone")
        wait_for(lambda: len(os.listdir(f"{proc}/fd")) == idle, "descriptors are gone")
    for number in range(12):
        assert folders(str(tmp_path / f"run-{number}")) == ["step-00000001-w1.1"]


def test_a_hundred_saves_keep_no_descriptors(trainers: Trainers, url: str):
    """Neither keeper nor trainer has more open files after a hundred saves than after two."""
    rank = trainers(0)
    counts = []
    for step in range(1, 103):
        rank.save(step, nbytes=100, keep_last=2)
        rank.wait(step)
        if step in {2, 102}:
            counts.append((rank.do("fds"), len(os.listdir(f"/proc/{rank.keeper_pid}/fd"))))
    assert counts[0] == counts[1]
    assert committed(url) == [101, 102]
