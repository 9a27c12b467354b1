"""What ckpt writes today is what SPEC.md says: its reader, which knows nothing of ckpt, finds every byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.format import records
from ckpt.format.names import escape
from tests.distributed.models import build, gathered, train
from tests.format import spec_reader
from tests.ranks import run_ranks


def save_trained(rank: int, world: int, run: str, kind: str, encode: str) -> dict[str, Any] | None:
    """Train, save as two steps, and give rank 0's gathered state as (dtype, shape, digest)."""
    model, optimizer = build(kind, world, width=8)
    expected: dict[str, Any] = {}
    for step in (1, 2):
        train(model, optimizer, rank, world, steps=1)
        ckpt.save(run, step, {"model": model, "optimizer": optimizer, "step": step}, encode=encode, wait=True)
    for name, tensor in gathered(model, optimizer).items():
        parameter, _, key = name.partition("/")
        stored = f"optimizer.state.{escape(key)}.model.{parameter}" if key else f"model.{name}"
        data = tensor.contiguous().numpy().tobytes()
        expected[stored] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), records.digest(data))
    return expected if rank == 0 else None


@pytest.mark.parametrize(
    ("world", "kind", "encode"),
    [(1, "plain", "raw"), (2, "ddp", "raw"), (3, "fsdp", "zstd"), (4, "fsdp_tp", "raw"), (4, "hsdp", "zstd")],
)
def test_the_spec_reader_reads_todays_steps(tmp_path: Path, world: int, kind: str, encode: str) -> None:
    """Replicas, uneven and strided shards, packs: bit for bit the state that was saved."""
    expected = run_ranks(world, save_trained, str(tmp_path / "run"), kind, encode)[0]
    step = spec_reader.read_step(tmp_path / "run")
    found = {name: (dtype, shape, records.digest(data)) for name, (dtype, shape, data) in step.tensors.items()}
    assert found == expected
    assert step.number == 2
    assert step.values[0]["step"] == 2
    assert sorted(spec_reader.live_steps(tmp_path / "run")) == [1, 2]
