"""S23: a flipped bit or a stray shard passes every format check, and training goes on with bad weights.

Each damage on its own to a step of two ranks' shards: load and verify fail and name the file, the step before stays
usable; with parity the load repairs and says so. The battery in ``tests/damage`` has every file and every kind.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.cli import main
from ckpt.reading.spans import file_spans
from ckpt.reading.step import StepReader
from ckpt.run import Run
from tests.ranks import run_ranks

SHAPES = {"first": (64, 40), "zeros": (32, 24), "third": (16, 9)}


def values(name: str, step: int) -> torch.Tensor:
    """What a parameter holds in a step; one of the three is all zero in every one."""
    shape = SHAPES[name]
    return torch.zeros(shape) if name == "zeros" else torch.arange(float(shape[0] * shape[1])).reshape(shape) + step


class Three(nn.Module):
    """Three parameters, sharded over the ranks there are."""

    def __init__(self, world: int, step: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        for name in SHAPES:
            whole = values(name, step)
            self.register_parameter(
                name, nn.Parameter(whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)]))
            )


def save_steps(_rank: int, world: int, run: str, encode: str, parity: int) -> None:
    """Steps 1 and 2."""
    for step in (1, 2):
        ckpt.save(run, step, {"model": Three(world, step), "epoch": step}, encode=encode, parity=parity, wait=True)


@pytest.fixture(scope="module", params=["raw", "zstd"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run without and one with parity."""
    folder = tmp_path_factory.mktemp("s23")
    for parity in (0, 1):
        run_ranks(2, save_steps, str(folder / f"parity{parity}"), request.param, parity)
    return folder / "parity0", folder / "parity1"


def shard(root: Path, rank: int, step: int = 2) -> Path:
    """A rank's data file."""
    (path,) = root.glob(f"step-{step:08}-*/model-{rank:05}-of-00002.*")
    return path


def part(root: Path, step: int = 2) -> Path:
    (path,) = root.glob(f"step-{step:08}-*/part-00001-of-00002.json")
    return path


def flip(path: Path, at: int) -> Path:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 16
    path.write_bytes(raw)
    return path


def places(root: Path, rank: int) -> dict[str, int]:
    """Tensor -> a byte in the middle of its payload in a rank's file; ``header`` of a raw one."""
    reader = StepReader.open(Run.open(root), 2)
    (shards,) = reader.files(reader.part(rank))
    found = {(span.tensor or "header").partition("[")[0]: span for span in file_spans(shards)}
    return {name.removeprefix("model."): span.offset + min(span.nbytes // 2, 200) for name, span in found.items()}


def flip_payload(name: str) -> Callable[[Path], Path]:
    return lambda root: flip(shard(root, 1), places(root, 1)[name])


def flip_header(root: Path) -> Path:
    at = places(root, 0).get("header")  # a pack has none: its first bytes are a frame's
    return flip(shard(root, 0), 2 if at is None else at)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def swap(root: Path) -> Path:
    first, second = shard(root, 0), shard(root, 1)
    mine, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(mine)
    return first


def of_step_before(root: Path) -> Path:
    shutil.copy(shard(root, 1, step=1), shard(root, 1))
    return shard(root, 1)


def strip_checksums(root: Path) -> Path:
    def strip(raw: bytes) -> bytes:
        record = json.loads(raw)
        for file in record["files"]:
            file["chunks"], file["header_digest"] = [], ""
            file["packed"] = [["", *packed[1:]] for packed in file["packed"]]
        return json.dumps(record).encode()

    return rewrite(part(root), strip)


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "payload bit of the first tensor": flip_payload("first"),
    "payload bit of the all-zero tensor": flip_payload("zeros"),
    "payload bit of the third tensor": flip_payload("third"),
    "header bit": flip_header,
    "manifest bit": lambda root: flip(part(root), 60),
    "COMMIT bit": lambda root: flip(part(root).with_name("COMMIT"), 60),
    "last byte cut": lambda root: rewrite(shard(root, 0), lambda raw: raw[:-1]),
    "a byte more": lambda root: rewrite(shard(root, 0), lambda raw: raw + b"\0"),
    "shards swapped": swap,
    "shard of the step before": of_step_before,
    "checksums stripped": strip_checksums,
}


# Records, which no parity covers; and two members of the one parity there is.
BEYOND_PARITY = {"manifest bit", "COMMIT bit", "checksums stripped", "shards swapped"}


def loaded(root: Path, step: int | str) -> tuple[dict[str, Any], ckpt.LoadReport]:
    """A state loaded by one rank."""
    state: dict[str, Any] = {"model": Three(1, 99), "epoch": 99}
    return state, ckpt.load(root, state, step=step)


def assert_is(state: dict[str, Any], step: int) -> None:
    """Bit for bit."""
    assert state["epoch"] == step
    for name, parameter in state["model"].named_parameters():
        assert parameter.detach().numpy().tobytes() == values(name, step).numpy().tobytes(), name


@pytest.mark.parametrize("what", DAMAGES)
def test_s23_is_refused_and_named(saved: tuple[Path, Path], tmp_path: Path, capsys: Any, what: str) -> None:
    """Load and verify fail with exit code 4 and name the file; the latest is the step before, bit for bit."""
    root = tmp_path / "run"
    shutil.copytree(saved[0], root)
    damaged = DAMAGES[what](root)
    with pytest.raises(ckpt.DamagedError, match=damaged.name) as raised:
        loaded(root, 2)
    assert raised.value.exit_code == 4
    assert main(["verify", str(root), "--step", "2"]) == 4
    assert damaged.name in capsys.readouterr().out
    state, report = loaded(root, "latest")
    assert_is(state, 1)
    assert damaged.name in report.skipped[0].why
    assert main(["verify", str(root), "--step", "1"]) == 0


@pytest.mark.parametrize("what", [what for what in DAMAGES if what not in BEYOND_PARITY])
def test_s23_is_repaired_from_parity(saved: tuple[Path, Path], tmp_path: Path, what: str) -> None:
    """With parity the same step is loaded, says what it repaired, and `ckpt repair` gives every byte back."""
    root = tmp_path / "run"
    shutil.copytree(saved[1], root)
    damaged = DAMAGES[what](root)
    state, report = loaded(root, 2)
    assert_is(state, 2)
    assert report.repaired
    assert all(damaged.name in text and "from parity-00000-of-00002.xor" in text for text in report.repaired)
    assert main(["repair", str(root)]) == 0
    assert main(["verify", str(root)]) == 0
    assert damaged.read_bytes() == (saved[1] / damaged.relative_to(root)).read_bytes()
    assert sorted(os.listdir(damaged.parent)) == sorted(os.listdir(saved[1] / damaged.parent.relative_to(root)))
