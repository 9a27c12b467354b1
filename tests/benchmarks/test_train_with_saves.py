"""Training beside saves in small, and what the kernel is asked for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.benchmarks.running import bounds, run_small


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_small_run(tmp_path: Path):
    """Both sides, with the memory beyond the arenas."""
    figures, output = run_small(tmp_path, "train_with_saves.py", "--pairs=1")
    assert "pair 1 of 1" in output
    assert bounds(figures) == {
        ("ckpt step while saving", "ckpt step without"): 1.1,
        ("ckpt keeper CPU per GB", "dcp thread CPU per GB"): 0.25,
        ("memory beyond the arenas", None): 128 << 20,
    }
    value = {figure["name"]: figure["value"] for figure in figures}
    for name in ("ckpt keeper CPU per GB", "dcp thread CPU per GB", "ckpt persisted in", "dcp persisted in"):
        assert value[name] > 0
    assert value["memory beyond the arenas"] == value["keeper's memory"] + value["trainer's memory"]
    assert 1 << 20 < value["keeper's memory"] < 1 << 30


def test_figures():
    """Ratios are of a pair's own two sides."""
    from train_with_saves import ROWS, figures

    def pair(ours: float, theirs: float) -> dict[str, float]:
        return {name: ours for name, *_ in ROWS} | {against: theirs for _, against, *_ in ROWS}

    memory = {"memory beyond the arenas": 200 << 20, "keeper's memory": 150 << 20, "trainer's memory": 50 << 20}
    found = {figure.name: figure for figure in figures(1000, memory, [pair(1, 2), pair(9, 3), pair(1, 10)])}
    assert found["ckpt keeper CPU per GB"].value == 1
    assert found["ckpt keeper CPU per GB"].ratio == 0.5
    assert found["ckpt step while saving"].holds is True
    assert found["memory beyond the arenas"].holds is False
    assert found["keeper's memory"].holds is None


def test_cpu_of_a_process():
    """CPU that this process uses is seen in its clock, and time that it sleeps is not."""
    from processes import cpu_s

    before, own = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - own < 0.05:
        pass
    assert 0.05 <= cpu_s(os.getpid()) - before <= time.process_time() - own + 0.05


def test_bytes_and_memory_of_a_process(tmp_path: Path):
    """Reads and writes are counted to the byte or nearly; memory is seen once touched, and shared memory is not."""
    import mmap

    from processes import bytes_read, bytes_written, private_nbytes

    nbytes = 8 << 20
    written = bytes_written()
    (tmp_path / "file").write_bytes(bytes(nbytes))
    assert nbytes <= bytes_written() - written < nbytes + 4096
    read = bytes_read()
    assert len((tmp_path / "file").read_bytes()) == nbytes
    assert nbytes <= bytes_read() - read < nbytes + 65536

    before = private_nbytes()
    shared = mmap.mmap(-1, 64 << 20)
    shared.write(bytes(1) * (64 << 20))
    del read, written
    assert private_nbytes() - before < 32 << 20
    own = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, 64 << 20, 4096):
        own[at] = 1
    assert private_nbytes() - before > 48 << 20
    shared.close()
    own.close()
