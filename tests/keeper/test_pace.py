"""The cap on what a run's saves write: what is owed, how writes are cut, and saves that wait on purpose."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import BadInputError
from ckpt.keeper.client import KeeperClient, statuses
from ckpt.keeper.pace import Pace, PacedSink
from ckpt.store import open_store
from tests.keeper.conftest import Trainer, TrainerError, wait_for
from tests.keeper.rank_process import fill, hand_over, stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]
MIB = 1 << 20


def test_what_is_written_is_paid_off_before_more_is():
    """The first bytes go at once; the next ones wait as long as those take at the asker's own cap."""
    pace = Pace()
    assert pace.wait_s(1_000_000, 0.001) == 0.0
    assert 999 < pace.wait_s(1, 0.001) <= 1000
    assert 9 < pace.wait_s(1, 0.1) <= 10
    deadline = time.monotonic() + 30
    while wait_s := pace.wait_s(5_000_000, 100.0):
        assert 0 < wait_s <= 0.01
        assert time.monotonic() < deadline
    assert 0 < pace.wait_s(1, 1.0) <= 5


def test_writes_are_cut_into_pieces_that_the_cap_lets_through(tmp_path: Path):
    """Whatever is written at once, all of it arrives, in order, and a rest comes before every piece but the first."""
    data = bytes(range(256)) * (4 * MIB // 256) + b"tail"
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        time.sleep(seconds)

    store = open_store(str(tmp_path))
    started = time.monotonic()
    with PacedSink(store.open_sink("key", len(data)), Pace(), 4.0, rest) as sink:
        sink.write(memoryview(data))
        sink.write(b"")
    assert len(rests) >= 4  # five pieces of a quarter second
    assert max(rests) <= 0.25
    assert time.monotonic() - started >= (len(data) - 1_000_000) / 4e6  # the last one is owed for when it is written
    with pytest.raises(ZeroDivisionError), PacedSink(store.open_sink("other"), Pace(), 1.0, rest) as sink:
        sink.write(b"debris")
        raise ZeroDivisionError
    assert store.list() == ["key"]
    assert store.get("key") == data


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_a_cap_holds_for_all_ranks_of_a_node_together(trainers: Trainers, url: str, encode: str):
    """Two ranks write no faster than the cap lets them both, and their save becomes a step; the next one has no cap."""
    ranks = [trainers(0), trainers(1)]
    started = time.monotonic()
    for rank in ranks:
        rank.hand_over(1, world=2, nbytes=4_000_000 if encode == "raw" else 400, encode=encode, max_write_mbps=8.0)
    for rank in ranks:
        rank.wait(1)
    if encode == "raw":
        assert time.monotonic() - started >= (8e6 - 2e6) / 8e6  # the last piece is owed for when it is written
    check_step(url, 1, world=2)
    for rank in ranks:
        rank.save(2, world=2, nbytes=4_000_000)
    for rank in ranks:
        rank.wait(2)
    check_step(url, 2, world=2)


def test_a_save_that_waits_on_purpose_makes_progress(folder: Path, url: str):
    """A cap under which nothing is written for longer than the progress time-out does not fail the save."""
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1, nbytes=200_000, max_write_mbps=0.1, progress_timeout_s=0.4).wait(60)
    check_step(url, 1)


def test_a_save_that_fails_while_it_waits_ends_at_once(trainers: Trainers, url: str):
    """The peer's death is told though the next piece is minutes away; nothing is left to hold up the next save."""
    first, second = trainers(0), trainers(1)
    first.hand_over(1, world=2, nbytes=4 * MIB, progress_timeout_s=3600, max_write_mbps=0.0001)
    second.do("begin", run=url, step=1, save=1, world=2, nbytes=4 * MIB, ready=0)
    wait_for(lambda: [rank.rank for rank in statuses()[0].saves[0].ranks] == [0, 1], "both have begun")
    second.kill()
    with pytest.raises(TrainerError, match=rf"rank 1 \(process {second.pid}\) died before its snapshot"):
        first.wait(1)
    assert folders(url) == []
    again = trainers(1)
    for rank in (first, again):
        rank.save(1, save=2, world=2, max_write_mbps=100.0)
    for rank in (first, again):
        rank.wait(2)
    assert committed(url) == [1]


@pytest.mark.parametrize("mbps", [0.0, -1.0, math.nan, math.inf])
def test_a_cap_that_makes_no_sense_is_refused(folder: Path, url: str, mbps: float):
    """By name, before a byte is written."""
    with KeeperClient.connect(0) as client:
        _, task = fill(client, url, 1, 1, max_write_mbps=mbps)
        with pytest.raises(BadInputError, match="max_write_mbps"):
            hand_over(client, task).wait(30)
    assert folders(url) == []
