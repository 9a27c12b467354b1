"""Two hundred saves: neither the trainers nor the keeper grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.crash.jobs import Job, check_steps

Jobs = Callable[..., Job]

WARM, SAVES = 20, 200
GROWTH_NBYTES = 1 << 20


class Size(msgspec.Struct, frozen=True):
    """What a process holds, all but its memory."""

    descriptors: int
    mappings: int  # of files, and of arenas
    threads: int


def size(pid: int) -> Size:
    """Of a process, as the kernel sees it."""
    folder = Path(f"/proc/{pid}")
    return Size(
        descriptors=len(os.listdir(folder / "fd")),
        # What Python's allocator maps, 1 MiB at a time, has no name; it is counted as resident memory.
        mappings=sum(len(line.split()) > 5 for line in (folder / "maps").read_text().splitlines()),
        threads=len(os.listdir(folder / "task")),
    )


def resident_nbytes(pid: int) -> int:
    """Of a process."""
    words = Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()
    return int(words[0]) * 1024


@pytest.mark.parametrize("world", [1, 2])
def test_two_hundred_saves_grow_nothing(jobs: Jobs, run: str, world: int):
    """Descriptors, mappings and threads are those after 20 saves; resident memory grows by less than 1 MiB."""
    job = jobs(world, nbytes=1 << 16)
    job.start(2)
    job.do("save_often", 1, WARM)
    pids = {"keeper": job.keeper_pid, **{f"rank {rank.rank}": rank.pid for rank in job.ranks}}
    before = {name: (size(pid), resident_nbytes(pid)) for name, pid in pids.items()}
    job.do("save_often", WARM + 1, SAVES)
    after = {name: (size(pid), resident_nbytes(pid)) for name, pid in pids.items()}
    assert {name: held for name, (held, _) in after.items()} == {name: held for name, (held, _) in before.items()}
    growth = {name: after[name][1] - before[name][1] for name in pids}
    assert max(growth.values()) < GROWTH_NBYTES, growth
    job.end()
    check_steps(run, [SAVES - 1, SAVES], world)
