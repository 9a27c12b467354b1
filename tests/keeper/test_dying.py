"""Trainers and keepers that are killed, and jobs that end."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import KeeperError
from ckpt.keeper.client import KeeperClient, settle
from ckpt.testing import store_env
from tests.keeper.conftest import Trainer, TrainerError, is_alive, wait_for
from tests.keeper.rank_process import stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]


def test_a_trainer_killed_after_staging_loses_nothing(trainers: Trainers, url: str):
    """SIGKILL right after ``staged``: the keeper writes and commits alone, then ends."""
    rank = trainers(0)
    rank.save(7, nbytes=64 << 20)
    rank.kill()
    assert settle(url, timeout_s=30) == []
    check_step(url, 7)
    wait_for(lambda: not is_alive(rank.keeper_pid), "the keeper is gone")


def test_all_ranks_killed_after_staging(trainers: Trainers, url: str):
    """The same with two ranks, whose files are still unwritten when both die."""
    ranks = [trainers(rank) for rank in range(2)]
    for rank in ranks:
        rank.save(7, world=2, nbytes=32 << 20)
    for rank in ranks:
        rank.kill()
    assert settle(url, timeout_s=30) == []
    check_step(url, 7, world=2)


def test_a_trainer_killed_before_staging_fails_its_peers(trainers: Trainers, url: str):
    """The peer that has staged is told which rank died, at once; no step and no debris is left."""
    first, second = trainers(0), trainers(1)
    first.save(7, world=2, progress_timeout_s=3600)
    second.do("borrow", run=url, nbytes=100)
    second.kill()
    with pytest.raises(TrainerError, match=rf"rank 1 \(process {second.pid}\) died before") as caught:
        first.wait(7)
    assert caught.value.kind == "RankError"
    assert "step 7 (w1.7)" in caught.value.message
    assert folders(url) == []


def test_a_trainer_that_died_before_its_peer_staged(trainers: Trainers, url: str):
    """The peer stages only after the death: the keeper remembers it."""
    first, second = trainers(0), trainers(1)
    second.kill()
    with pytest.raises(TrainerError, match=r"rank 1 .* died"):
        first.save(7, world=2, progress_timeout_s=3600)


def test_the_first_rank_killed_before_staging(trainers: Trainers, url: str):
    """When rank 0 dies, nobody is left who would write COMMIT; its peer learns that too."""
    first, second = trainers(0), trainers(1)
    second.save(7, world=2, progress_timeout_s=3600)
    first.kill()
    with pytest.raises(TrainerError, match=r"rank 0 .* died"):
        second.wait(7)
    assert folders(url) == []


def test_a_death_does_not_fail_the_restarted_job(trainers: Trainers, url: str):
    """After a restart this node has other ranks; those that died here do not fail their saves."""
    old = [trainers(0, CKPT_LINGER_S="20"), trainers(1)]
    for rank in old:
        rank.kill()
    new = trainers(0)
    assert new.keeper_pid == old[0].keeper_pid
    new.save(8, world=2, progress_timeout_s=0.5)  # rank 1 lives on another node now, and is late
    with pytest.raises(TrainerError, match=r"no progress for 0\.5 s: no part from rank 1 of 2"):
        new.wait(8)
    new.do("close")  # the job is done, although a rank of its earlier start never came back
    wait_for(lambda: not is_alive(new.keeper_pid), "the keeper is gone")


def test_a_killed_keeper(folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was pending fails with a KeeperError, the client knows that it is not alive, and connecting again works."""
    gate = tmp_path / "gate"
    for name, value in store_env({"wrap": "blocking", "program": "keeper", "match": "COMMIT", "release": gate}).items():
        monkeypatch.setenv(name, value)
    client = KeeperClient.connect(0)
    pending = stage(client, url, 1, 1)
    pending.wait_staged(30)
    os.kill(client.keeper_pid, signal.SIGKILL)
    with pytest.raises(KeeperError, match=rf"the keeper \(pid {client.keeper_pid}\) is gone"):
        pending.wait(30)
    assert not client.alive
    for _ in range(2):
        with pytest.raises(KeeperError, match="is gone"):
            client.arena(10)
    client.close()
    gate.touch()
    with KeeperClient.connect(0) as again:
        assert again.keeper_pid != client.keeper_pid
        stage(again, url, 2, 2).wait(30)
    assert committed(url) == [2]


def test_a_keeper_ends_with_its_job_and_leaves_nothing(folder: Path, url: str):
    """After the last bye the process is gone, and so are socket, secret, lock and log."""
    client = KeeperClient.connect(0)
    stage(client, url, 1, 1)
    client.close()
    wait_for(lambda: not is_alive(client.keeper_pid), "the keeper is gone")
    assert os.listdir(folder) == []
    check_step(url, 1)


def test_a_keeper_waits_for_all_its_clients(trainers: Trainers, url: str):
    """One rank's bye does not end the keeper of another one."""
    first, second = trainers(0), trainers(1)
    first.do("close")
    second.save(1, save=1, world=1 + 1, progress_timeout_s=3600)
    assert is_alive(second.keeper_pid)
    second.kill()
    first.end()
    assert is_alive(second.keeper_pid)
    os.kill(second.keeper_pid, signal.SIGKILL)  # it would wait an hour for rank 0, on what may be another node


def test_a_restarted_job_finds_its_keeper(trainers: Trainers, url: str):
    """A keeper lingers after a death without bye; the next process of the rank gets the same one, and its memory."""
    rank = trainers(0, CKPT_LINGER_S="20")
    rank.save(1)
    rank.kill()
    again = trainers(0)
    assert again.keeper_pid == rank.keeper_pid
    again.save(2)
    again.wait(2)
    assert committed(url) == [1, 2]
    again.do("close", done=False)
    third = trainers(0)
    assert third.keeper_pid == rank.keeper_pid
    third.do("close")
    wait_for(lambda: not is_alive(rank.keeper_pid), "the keeper is gone")


def test_lingering_ends(trainers: Trainers):
    """Nobody comes back: the keeper ends after CKPT_LINGER_S."""
    rank = trainers(0, CKPT_LINGER_S="0.1")
    rank.kill()
    wait_for(lambda: not is_alive(rank.keeper_pid), "the keeper is gone")


def test_sigterm_finishes_what_is_staged(trainers: Trainers, url: str, tmp_path: Path):
    """SIGTERM to the keeper: the trainer may still make its last save, and nothing lingers after it has died."""
    rank = trainers(0, CKPT_LINGER_S="600")
    os.kill(rank.keeper_pid, signal.SIGTERM)
    rank.save(1, nbytes=32 << 20)
    rank.kill()
    wait_for(lambda: not is_alive(rank.keeper_pid), "the keeper is gone")
    check_step(url, 1)


def test_death_is_seen_although_a_child_holds_the_socket(folder: Path, url: str):
    """A forked child keeps the dead trainer's socket open; the pidfd tells all the same."""
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        client = KeeperClient.connect(0)
        client._disown = lambda: None  # type: ignore[method-assign]  # as a child that was forked by foreign code
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(writer, f"{client.keeper_pid} {child}".encode())
        signal.pause()
    keeper, child = map(int, os.read(reader, 100).split())
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        wait_for(lambda: not is_alive(keeper), "the keeper is gone", timeout_s=5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_forked_child_cannot_use_the_connection(folder: Path, url: str):
    """In a forked child the client refuses by name, the arena is not mapped, and the parent's connection lives on."""
    client = KeeperClient.connect(0)
    arena = client.arena(100, url)
    pending = stage(client, url, 1, 1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for act in (lambda: client.arena(1), lambda: pending.wait(1), lambda: client.release(arena)):
                with pytest.raises(KeeperError, match="is a fork"):
                    act()
            assert not client.alive
            client.close()
            with open("/proc/self/maps") as maps:
                assert not any(line.startswith(f"{address:x}-") for line in maps)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pending.wait(30)
    client.release(arena)
    client.close()
