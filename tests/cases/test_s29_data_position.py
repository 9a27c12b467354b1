"""S29: the data goes on at the very sample, in the order of its own epoch, without reading what was passed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import ckpt
from tests.ranks import run_ranks

LENGTH, BATCH, EPOCHS = 10, 3, 3
PREFETCH = 2  # batches that each worker is ahead, torch's default


class Counted(Dataset[int]):
    """range(10), and a file that grows by a byte for each sample that is read, in whatever process."""

    def __init__(self, notes: Path) -> None:
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._path = notes

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        os.write(self._notes, b".")
        return index

    def count(self) -> int:
        """How many samples were read so far."""
        return self._path.stat().st_size


def made(rank: int, folder: Path, workers: int, drop_last: bool) -> tuple[Counted, ckpt.ResumableLoader]:
    """This rank's samples and loader."""
    folder.mkdir(exist_ok=True)
    samples = Counted(folder / f"reads-{rank}")
    context = "fork" if workers else None  # as scripts have it: these ranks themselves are children of a fork server
    return samples, ckpt.ResumableLoader(
        samples, BATCH, seed=4, drop_last=drop_last, num_workers=workers, multiprocessing_context=context
    )


def uninterrupted(rank: int, world: int, folder: Path, workers: int, drop_last: bool) -> list[list[list[int]]]:
    """All epochs, saving before the first batch and after each; the samples of each batch of each epoch."""
    _, loader = made(rank, folder / "whole", workers, drop_last)
    saves, log = 0, []
    pendings = [ckpt.save(folder / "run", saves, {"data": loader})]
    for _ in range(EPOCHS):
        log.append([])
        for batch in loader:
            log[-1].append(batch.tolist())
            saves += 1
            pendings.append(ckpt.save(folder / "run", saves, {"data": loader}))
    for pending in pendings:
        pending.result()
    return log


def resumed(rank: int, world: int, folder: Path, workers: int, drop_last: bool, points: int) -> list[Any]:
    """From each point: the batches that come, how many samples were read for the first, and for all of them."""
    found = []
    for point in range(points):
        samples, loader = made(rank, folder / f"from-{point}", workers, drop_last)
        ckpt.load(folder / "run", {"data": loader}, step=point)
        after_load = samples.count()
        batches, for_first = [], None
        while loader.epoch < EPOCHS:
            for batch in loader:
                batches.append(batch.tolist())
                for_first = samples.count() if for_first is None else for_first
        found.append((batches, after_load, for_first, samples.count()))
    return found


@pytest.mark.parametrize("drop_last", [False, True], ids=["all", "drop-last"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_s29_any_batch_of_any_epoch(tmp_path: Path, world: int, workers: int, drop_last: bool) -> None:
    """In a new process, from every batch of three epochs: the samples that were left, each read once, none other."""
    logs = run_ranks(world, uninterrupted, tmp_path, workers, drop_last)
    for epoch in range(EPOCHS):
        read = [index for log in logs for batch in log[epoch] for index in batch]
        whole = LENGTH // (BATCH * world) * BATCH * world if drop_last else LENGTH
        assert len(read) == len(set(read)) == whole
    for log in logs:
        assert log[0] != log[1] != log[2] != log[0], "an order that is the same in every epoch"
    expected = [[batch for epoch in log for batch in epoch] for log in logs]
    points = len(expected[0])
    assert points == EPOCHS * len(logs[0][0])

    for rank, found in enumerate(run_ranks(world, resumed, tmp_path, workers, drop_last, points)):
        for point, (batches, after_load, for_first, for_all) in enumerate(found):
            assert batches == expected[rank][point:], (rank, point)
            assert after_load == 0
            assert for_first <= BATCH * (1 + workers * PREFETCH)
            assert for_all == sum(map(len, batches)), (rank, point)


def finish(rank: int, world: int, folder: Path) -> list[int]:
    """A batch of the third epoch, stopped in its midst, on another number of ranks."""
    _, loader = made(rank, folder / f"other-{world}", 0, False)
    ckpt.load(folder / "run", {"data": loader})
    return [index for batch in loader for index in batch.tolist()]


def stop(rank: int, world: int, folder: Path) -> list[int]:
    """Two epochs and a batch."""
    _, loader = made(rank, folder / "whole", 0, False)
    read = []
    for _ in range(2):
        for _ in loader:
            pass
    for batch in loader:
        read = batch.tolist()
        break
    ckpt.save(folder / "run", 1, {"data": loader}, wait=True)
    return read


def test_s29_an_epoch_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """What one rank has left of its third epoch, two ranks read to the end: each sample exactly once."""
    (before,) = run_ranks(1, stop, tmp_path)
    after = [index for read in run_ranks(2, finish, tmp_path) for index in read]
    assert sorted(before + after) == list(range(LENGTH))
