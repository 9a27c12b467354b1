"""S12: a load takes the memory of its rank's share and a bounded buffer, and reads its share only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.format.values import ModuleNode
from ckpt.run import Run
from ckpt.store import open_store
from ckpt.testing import read_log, store_env
from ckpt.testing.handmade import HandTensor, write_step
from tests.ranks import run_ranks

MIB = 1 << 20
TENSORS, ROWS, COLUMNS = 64, 256, 1024  # of float32: 1 MiB each
WORLD = 4


def job(world: int, rank: int, *, filled: bool) -> dict[str, Any]:
    """64 tensors of 1 MiB, each cut over all ranks; every element tells tensor and row."""
    mesh = init_device_mesh("cpu", (world,))
    rows = ROWS // world
    state = {}
    for number in range(TENSORS):
        own = torch.zeros(rows, COLUMNS)
        if filled:
            own += 1000 * number + torch.arange(rank * rows, (rank + 1) * rows)[:, None]
        state[f"w{number:02}"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return state


def save(rank: int, world: int, run: str) -> None:
    """By four ranks."""
    ckpt.save(run, 1, job(world, rank, filled=True), wait=True)


def resident_nbytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM``, its highest value, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def load(rank: int, world: int, run: str) -> tuple[int, int]:
    """(pid, bytes by which this process grew at most); the target's memory is touched by the load first."""
    expected = 1000 * (TENSORS - 1) + torch.arange(rank * ROWS // world, (rank + 1) * ROWS // world)
    state = job(world, rank, filled=False)
    open_store(run)  # what code the store takes is loaded: fsspec itself is 10 MiB
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM counts
    before = resident_nbytes("VmRSS")
    ckpt.load(run, state)
    grown = resident_nbytes("VmHWM") - before
    found = state[f"w{TENSORS - 1}"].to_local()
    assert torch.equal(found, expected[:, None].expand_as(found).float())
    return os.getpid(), grown


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved once for all."""
    folder = str(tmp_path_factory.mktemp("s12") / "run")
    run_ranks(WORLD, save, folder)
    return folder


@pytest.mark.parametrize(("world", "scheme"), [(WORLD, ""), (WORLD, "fsspec+file://"), (2, "")])
def test_s12_a_rank_reads_and_holds_its_share(run: str, tmp_path: Path, world: int, scheme: str) -> None:
    """As many ranks as saved, or others; from a path, or through fsspec."""
    share = TENSORS * MIB // world
    log = tmp_path / "log"
    environment = store_env({"wrap": "recording", "log": log, "operation": "reading"})
    loads = run_ranks(world, load, f"{scheme}{run}", env=environment)
    read: Counter[int] = Counter()
    for done in read_log(log):
        read[done.pid] += done.nbytes
    for rank, (pid, grown) in enumerate(loads):
        assert share <= read[pid] < 1.25 * share, f"rank {rank} read {read[pid] / MIB:.1f} MiB"
        assert grown < share + 16 * MIB, f"rank {rank} grew by {grown / MIB:.1f} MiB"


# What is imported beforehand is not the export's; from then on the process's highest memory counts.
EXPORT = """
import sys
from pathlib import Path
import ckpt.engine.export
from ckpt.cli import main

def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10

if sys.argv[-1] == "torch":
    import torch
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS:")
assert main(sys.argv[1:]) == 0
print("grown", resident("VmHWM:") - before)
"""
LARGEST = 48 * MIB
CONSTANT = 16 * MIB


@pytest.mark.parametrize("way", ["safetensors", "torch"])
def test_s12_an_export_holds_one_tensor(tmp_path: Path, way: str) -> None:
    """192 MiB in four tensors: while they are exported to one file no more than two of them are in memory."""
    opened = Run.open(tmp_path / "run")
    tensors = [
        HandTensor(f"model.w{i}", "uint8", (LARGEST,), bytes([i + 1]) * LARGEST, "model", (4,), ("S0",))
        for i in range(4)
    ]
    write_step(opened, 1, tensors, world=4, values={"model": ModuleNode("model", {})})
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, "restore", opened.url, str(out), "--format", way],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = [path for path in out.iterdir() if path.suffix != ".json"]
    assert file.stat().st_size > 4 * LARGEST
    grown = int(done.stdout.rpartition("grown ")[2])
    assert grown < 2 * LARGEST + CONSTANT, f"grew by {grown / MIB:.0f} MiB"
