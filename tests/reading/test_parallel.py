"""Which chunks are read together, and that an error of one is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.reading import parallel
from ckpt.reading.step import StepReader
from ckpt.run import Run
from ckpt.store import LocalStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step of 200 small tensors and two large ones."""
    state = {f"small{i:03}": torch.full((200 + i,), float(i)) for i in range(200)}
    state |= {f"large{i}": torch.full((200_000,), float(i)) for i in range(2)}
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    return tmp_path / "run"


def fetches(run: Path) -> tuple[StepReader, dict[str, bytearray], list]:
    """All of a step's tensors as fetches, and where they go."""
    reader = StepReader.open(Run.open(run))
    targets, found = {}, []
    for name, tensor in reader.tensors().items():
        targets[name] = bytearray(4 * tensor.shape[0])
        found.extend(reader.fetches(name, None, memoryview(targets[name])))
    return reader, targets, found


def test_small_neighbours_are_read_with_one_read(run: Path) -> None:
    """Large chunks alone, the 200 small ones together, each in its place."""
    reader, targets, found = fetches(run)
    groups = list(parallel.together(found))
    assert sorted(len(group) for group in groups) == [1, 1, 200]
    assert parallel.fetch_all(reader, found) == sum(len(target) for target in targets.values())
    for name, target in targets.items():
        assert set(torch.frombuffer(target, dtype=torch.float32).tolist()) == {float(name[5:])}


def test_distant_chunks_are_not_read_together(run: Path) -> None:
    """A load of two tensors does not read what lies between."""
    _, _, found = fetches(run)
    ends = [fetch for fetch in found if fetch.chunk.entry.name in {"small000", "small199"}]
    assert [len(group) for group in parallel.together(ends)] == [1, 1]


def test_damage_in_a_group_is_named(run: Path) -> None:
    """The tensor whose chunk is wrong, not the group."""
    (file,) = run.glob("step-*/state-*.safetensors")
    raw = bytearray(file.read_bytes())
    place = raw.rindex(torch.full((377,), 177.0).numpy().tobytes())
    raw[place] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ckpt.DamagedError, match="small177: chunk 0: digest"):
        ckpt.read(run)


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_many_threads_give_what_one_gives(tmp_path: Path, encode: str) -> None:
    """Chunks of several files and sizes, strided targets among them."""
    torch.manual_seed(0)
    state = {f"t{i}": torch.randn(700 * (i + 1), 33) for i in range(12)}
    ckpt.save(tmp_path / "run", 1, state, encode=encode, wait=True)
    target = {key: torch.zeros(33, len(value)).t() for key, value in state.items()}
    report = ckpt.load(tmp_path / "run", target)
    assert report.bytes_read == sum(value.nbytes for value in state.values())
    for key, value in state.items():
        assert torch.equal(target[key], value)


LARGE = (1 << 20) + 1  # elements: 4 MiB and a bit


@pytest.fixture
def large_run(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A step of tensors of 4 MiB and 20 MiB, page-aligned in the file and not, and what is in them."""
    torch.manual_seed(1)
    sizes = {"aligned": 1 << 20, "chunks": 5 << 20, "odd": LARGE, "odder": LARGE + 2}
    state = {name: torch.randn(size) for name, size in sizes.items()}
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    return tmp_path / "run", state


def empty(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def set_cache(run: Path, *, cold: bool) -> None:
    """Have the run's files in the page cache, or not."""
    for file in run.rglob("*"):
        if file.is_file():
            file.read_bytes()
            if cold:
                with file.open("rb") as opened:
                    os.fsync(opened)
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("cold", [True, False])
def test_what_was_saved_comes_back(large_run, cold):
    """From the disk and from the page cache; each file is opened for it once, and closed again."""
    run, state = large_run
    target, opened = empty(state), []
    set_cache(run, cold=cold)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        real = LocalStore.open_source
        patch.setattr(
            LocalStore, "open_source", lambda self, key, **how: (opened.append(key), real(self, key, **how))[1]
        )
        ckpt.load(run, target)
    assert len(opened) == len(set(opened)) == 1
    assert len(os.listdir("/proc/self/fd")) == before
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor)


@pytest.mark.parametrize("cold", [True, False])
def test_damage_is_named_from_disk_and_from_cache(large_run, cold):
    """File, tensor, chunk and both digests, whatever way the bytes came; nothing stays open."""
    run, state = large_run
    (file,) = run.glob("step-*/*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[raw.index(state["chunks"].numpy().tobytes()[-5000:])] ^= 1
    file.write_bytes(raw)
    set_cache(run, cold=cold)
    before = len(os.listdir("/proc/self/fd"))
    told = rf"{file.name}: chunks: chunk 1: digest [0-9a-f]{{32}}, its part says [0-9a-f]{{32}}"
    with pytest.raises(ckpt.DamagedError, match=told):
        ckpt.load(run, empty(state), step=1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-read")]


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("left", [0, 4096, 5_000_000])
def test_a_short_file_is_damage(large_run, cold, left):
    """A file that lost its end is damage that names it, and the step before is taken instead."""
    run, state = large_run
    older = {name: tensor + 1 for name, tensor in state.items()}
    ckpt.save(run, 2, older, wait=True)
    (file,) = run.glob("step-00000002-*/*.safetensors")
    os.truncate(file, left)
    set_cache(run, cold=cold)
    with pytest.raises(ckpt.DamagedError, match=rf"{file.name}: {left} bytes, its part says.*must not be used"):
        ckpt.load(run, empty(state), step=2)
    target = empty(state)
    report = ckpt.load(run, target)
    assert report.step == 1
    assert file.name in report.skipped[0].why
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor)


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_what_cannot_be_read_into_place(tmp_path: Path, encode: str) -> None:
    """Strided targets, other dtypes, 16-byte elements, scalars: chunk by chunk, more than one chunk of each."""
    torch.manual_seed(2)
    state = {
        "strided": torch.randn(1500, 3001),  # 18 MB: the second chunk begins in the middle of a row
        "cast": torch.randn(1500, 3001),
        "strided cast": torch.randn(3000, 1501),
        "complex": torch.randn(700, 1601, dtype=torch.complex128),
        "small": torch.randn(3, 5, 7),
        "scalar": torch.randn(()),
    }
    ckpt.save(tmp_path / "run", 1, state, encode=encode, wait=True)
    target = {
        "strided": torch.zeros(3001, 1500).t(),
        "cast": torch.zeros(1500, 3001, dtype=torch.float64),
        "strided cast": torch.zeros(1501, 3000, dtype=torch.bfloat16).t(),
        "complex": torch.zeros(1601, 700, dtype=torch.complex128).t(),
        "small": torch.zeros(5, 3, 7).transpose(0, 1),
        "scalar": torch.zeros((), dtype=torch.float64),
    }
    ckpt.load(tmp_path / "run", target, cast=True)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor.to(target[name].dtype)), name
