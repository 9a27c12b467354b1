"""S28: every rank goes on with its own random streams, whatever start-up code has drawn meanwhile.

Those of CUDA devices are in tests/gpu.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import ckpt
from tests.cases.cutting import cut_after
from tests.ranks import run_ranks

SAMPLES, BATCH = 24, 2
EPOCH_END = SAMPLES // (2 * BATCH)
TOTAL = EPOCH_END + 10


def draw() -> list[float]:
    """Some numbers of every generator, with the halves that gauss() and randn() keep back."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*numbers, *torch.rand(3).tolist(), torch.randn(1).item()]


class Noisy(Dataset[Any]):
    """Samples that are their number and fresh noise of every generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64)


def job(rank: int, world: int, run: str, workers: int, restarted: bool) -> tuple[int | None, list[Any]]:
    """Train with dropout; what each step drew, masked and read. A restarted job seeds all ranks alike."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seed = 7 if restarted else 1000 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if rank == 1 and not restarted:
        draw()
        draw()
        draw()
    context = "fork" if workers else None  # as scripts have it: these ranks themselves are children of a fork server
    loader = ckpt.ResumableLoader(Noisy(), BATCH, seed=3, num_workers=workers, multiprocessing_context=context)
    log = []
    with ckpt.Checkpointer(run, {"model": model, "optimizer": optimizer, "data": loader}) as checkpointer:
        batches = loader.forever()
        if restarted:  # what start-up code does after the state was restored
            draw()
            nn.Linear(50, 50)
            list(torch.utils.data.DataLoader(range(10), shuffle=True))
            model(torch.randn(2, 4))
        for step in checkpointer.steps(total=TOTAL):
            batch = next(batches)
            mask = model.module[1](torch.ones(16)).tolist()
            loss = model(batch.float() / SAMPLES).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.append((draw(), mask, batch.tolist(), loss.item()))
            if step in (EPOCH_END - 1, EPOCH_END) and not restarted:
                checkpointer.save(step)
    return checkpointer.restored_step, log


@pytest.mark.parametrize("workers", [0, 2])
def test_s28_each_rank_goes_on_with_its_own_numbers(tmp_path: Path, workers: int) -> None:
    """Resumed after step 5 and at an epoch's end: the next ten draws, masks and samples of each rank are the same."""
    run = tmp_path / "run"
    logs = [log for _, log in run_ranks(2, job, str(run), workers, False)]
    assert ckpt.steps(run) == [EPOCH_END - 1, EPOCH_END, TOTAL] == [5, 6, 16]
    for first, second in zip(*logs, strict=True):
        for mine, other in zip(first, second, strict=True):
            assert mine != other
    for step in (EPOCH_END - 1, EPOCH_END):
        resumed = run_ranks(2, job, str(cut_after(run, step, tmp_path / str(step))), workers, True)
        for rank, (restored, log) in enumerate(resumed):
            assert restored == step
            assert len(log) == TOTAL - step >= 10
            assert log == logs[rank][step:], f"rank {rank}, resumed after step {step}"


def save_streams(rank: int, world: int, run: str) -> list[list[float]]:
    """Save each rank's generators, and tell what they give next."""
    random.seed(1000 + rank)
    np.random.seed(1000 + rank)
    torch.manual_seed(1000 + rank)
    draw()
    ckpt.save(run, 1, {"rng": ckpt.RNG()}, wait=True)
    return [draw() for _ in range(5)]


def load_streams(rank: int, world: int, run: str) -> list[list[float]]:
    """What they give after a load; a process of its own, so nothing else has set them."""
    draw()
    ckpt.load(run, {"rng": ckpt.RNG()})
    return [draw() for _ in range(5)]


def test_s28_another_world_size_seeds_anew_by_rule(tmp_path: Path) -> None:
    """2 ranks go on; 1 and 3 are seeded anew: the same at every load, no two ranks alike, none as saved."""
    run = str(tmp_path / "run")
    saved = run_ranks(2, save_streams, run)
    assert run_ranks(2, load_streams, run) == saved
    for world in (1, 3):
        streams = run_ranks(world, load_streams, run)
        assert run_ranks(world, load_streams, run) == streams
        numbers = [number for stream in (*saved, *streams) for draws in stream for number in draws]
        assert len(set(numbers)) == len(numbers)
