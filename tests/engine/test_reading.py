"""Which chunks are read together, and that an error of one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine import reading
from ckpt.engine.tensors import StepReader
from ckpt.run import Run


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
    groups = list(reading.together(found))
    assert sorted(len(group) for group in groups) == [1, 1, 200]
    assert reading.fetch_all(reader, found) == sum(len(target) for target in targets.values())
    for name, target in targets.items():
        assert set(torch.frombuffer(target, dtype=torch.float32).tolist()) == {float(name[5:])}


def test_distant_chunks_are_not_read_together(run: Path) -> None:
    """A load of two tensors does not read what lies between."""
    _, _, found = fetches(run)
    ends = [fetch for fetch in found if fetch.chunk.entry.name in {"small000", "small199"}]
    assert [len(group) for group in reading.together(ends)] == [1, 1]


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
