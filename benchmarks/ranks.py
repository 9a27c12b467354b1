"""Ranks that measure together: begin at once, and take the slower one's time."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

Seconds = dict[str, float]


def begin(rendezvous: str | None = None, rank: int = -1, world: int = -1) -> bool:
    """Join the process group (without ``rendezvous``: torchrun's), with one thread; whether this rank is the first."""
    torch.set_num_threads(1)  # every rank has its core
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    return dist.get_rank() == 0


def slowest(seconds: Seconds) -> Seconds:
    """Each figure of the slower rank."""
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


def of_all(value: float) -> list[float]:
    """One number of every rank."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    found: list[float] = values.tolist()
    return found


def settle() -> None:
    """Wait for all ranks, and until the disk has no older dirty pages to write."""
    on_rank_0(os.sync)


def timed(act: Callable[[], object]) -> float:
    """Seconds of one call that all ranks begin together on a settled disk."""
    settle()
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def on_rank_0(act: Callable[[], object]) -> None:
    """Let rank 0 act while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def remove(folders: Iterable[Path]) -> None:
    """Delete whole folders, those that there are."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def workplace(above: Path, name: str) -> Iterator[Path]:
    """An empty folder ``name`` under ``above``, both made here and removed again; every rank enters and leaves it."""
    folder = above.resolve() / name
    on_rank_0(lambda: remove([folder]))
    on_rank_0(lambda: folder.mkdir(parents=True))
    try:
        yield folder
        dist.barrier()  # no rank still reads or writes
    finally:
        if dist.get_rank() == 0:
            remove([folder])
            with contextlib.suppress(OSError):  # not empty: it was there before
                above.rmdir()
