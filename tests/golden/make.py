"""Make golden runs anew: ``python -m tests.golden.make NAME…`` from the repository's root.

Only for a change of the format that is meant: golden runs are what older versions wrote, and new
versions must go on reading them. Add a run for a new feature instead, wherever that will do.
"""

from __future__ import annotations

import collections
import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.engine.load import memory_of
from ckpt.format import records
from ckpt.format.safetensors import DTYPE_NBYTES, NUMPY_DTYPES
from ckpt.format.writer import decode_writer, encode_writer, writer_key
from ckpt.run import Run
from tests.ranks import run_ranks

HERE = Path(__file__).parent

PLAIN: dict[str, Any] = {
    "epoch": 20,
    "lr": 1e-3,
    "text": "é",
    "none": None,
    "true": True,
    "bytes": b"\x00\xff",
    "tuple": (1, "a", None, 1.0),
    "list": [{"k": 1}, {"k": 2}],
    "empty": [{}, [], ()],
    "defaultdict": collections.defaultdict(list, x=[1]),
    "ordered": collections.OrderedDict(b=1, a=2),
    "huge": 2**70,
    "inf": float("inf"),
    "minus_zero": -0.0,
    "set": {3, "x"},
    "when": datetime(2024, 2, 29, tzinfo=UTC),
    "dtype": torch.bfloat16,
    "a.b": {7: "int", "7": "str", (1, "x"): 0},
}


class Net(nn.Module):
    """Uneven shards, tied weights, a buffer, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))

    def get_extra_state(self) -> dict[str, Any]:
        """Something that is no tensor."""
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        """Not needed here."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N,) to (N, 7)."""
        return self.head(self.norm(self.embed(tokens)))  # type: ignore[no-any-return]


def facts(tensor: torch.Tensor) -> list[Any]:
    """[dtype, shape, digest of the whole tensor's bytes]."""
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    digest = records.digest(memory_of(whole.contiguous()))
    return [str(whole.dtype).removeprefix("torch."), list(whole.shape), digest]


def save_sharded(rank: int, world: int, run: str) -> dict[str, Any]:
    """Raw files of two ranks: an FSDP2 module with its optimizer, DTensors, per-rank values, plain values."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([{"params": [model.embed.weight]}, {"params": model.norm.parameters(), "lr": 0.5}])
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    arange = torch.arange(30, dtype=torch.float64)
    extra = {
        "columns": distribute_tensor(arange.view(3, 10), mesh, [Shard(1)]),
        "one_row": distribute_tensor(arange.view(1, 30), mesh, [Shard(0)]),
        "replica": distribute_tensor(arange.to(torch.bfloat16).view(5, 6), mesh, [Replicate()]),
        "page": torch.arange(1024, dtype=torch.int32),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "array": torch.arange(4).numpy(),
        "list": [torch.ones(2), {"deep": torch.zeros(1, 1)}],
    }
    own = ckpt.per_rank({"seed": 100 + rank, "state": torch.full((3,), rank, dtype=torch.uint8)})
    ckpt.save(run, 7, {"model": model, "optimizer": optimizer, "extra": extra, "own": own, "plain": PLAIN}, wait=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {
        f"model.{name}": facts(tensor) for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
    }
    expected["model.head.weight"] = expected["model.embed.weight"]
    for parameter, state in optimizer.state.items():
        expected |= {f"optimizer.state.{key}.model.{names[parameter]}": facts(value) for key, value in state.items()}
    flat = {key: value for key, value in extra.items() if isinstance(value, torch.Tensor)}
    flat |= {"array": torch.arange(4), "list.0": torch.ones(2), "list.1.deep": torch.zeros(1, 1)}
    return expected | {f"extra.{key}": facts(value) for key, value in flat.items()}


def save_zstd(rank: int, world: int, run: str) -> dict[str, Any]:
    """Packs of two ranks: two steps, shards of more than one chunk, a chunk that zstd does not make smaller."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(2)
    noise = torch.randint(0, 256, (500,), dtype=torch.uint8, generator=generator)
    for step in (1, 2):
        big = torch.zeros(2, (17 << 20) + 3, dtype=torch.uint8)
        big[:, -1] = step
        state = {"big": distribute_tensor(big, mesh, [Shard(0)]), "noise": noise + step, "step": step}
        ckpt.save(run, step, state, encode="zstd", wait=True)
        if step == 1:
            expected = {"big": facts(big), "noise": facts(state["noise"])}
    dist.barrier()
    return expected


def save_dtypes(_: int, __: int, run: str) -> dict[str, Any]:
    """One rank: 24 bytes as each dtype, whole and as a numpy array where there is one."""
    raw = torch.arange(24, dtype=torch.uint8) * 11 + 3
    state: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for dtype, nbytes in DTYPE_NBYTES.items():
        given = raw % 2 if dtype == "bool" else raw[: 24 // nbytes * nbytes]
        tensor = given.clone().view(getattr(torch, dtype))
        state[dtype] = tensor
        expected[f"tensors.{dtype}"] = [dtype, [24 // nbytes], records.digest(given.numpy().tobytes())]
    arrays = {dtype: state[dtype].clone().numpy() for dtype in sorted(NUMPY_DTYPES)}
    ckpt.save(run, 1, {"tensors": state, "arrays": arrays}, wait=True)
    return expected | {f"arrays.{dtype}": expected[f"tensors.{dtype}"] for dtype in arrays}


def save_watched(_: int, world: int, run: str) -> dict[str, Any]:
    """Two ranks: parity, metrics of every kind of number, and tensors that are not finite."""
    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(6, dtype=torch.float32)
    values[[1, 4]] = torch.tensor([float("nan"), float("-inf")])
    whole = {"halves": values.view(2, 3), "same": torch.full((3,), 0.5)}
    state = {"halves": distribute_tensor(whole["halves"], mesh, [Shard(0)]), "same": whole["same"]}
    metrics = {"loss": 0.25, "accuracy": float("nan"), "perplexity": float("inf"), "samples": 7}
    ckpt.save(run, 5, {"state": state}, parity=1, metrics=metrics, wait=True)
    return {f"state.{name}": facts(tensor) for name, tensor in whole.items()}


SAVES = {
    "sharded": (2, save_sharded),
    "zstd": (2, save_zstd),
    "dtypes": (1, save_dtypes),
    "watched": (2, save_watched),
}


def main() -> None:
    """Write the runs that are named, and ``expected.json``, beside this file."""
    everything: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
    for name in sys.argv[1:]:
        world, save = SAVES[name]
        root = HERE / name
        if root.exists():
            shutil.rmtree(root)
        everything[name] = run_ranks(world, save, str(root), job="golden")[0]
        if name == "zstd":
            Run.open(root).rollback(1)  # step 2 is there, but abandoned
        for path in sorted((root / "writers").iterdir()):
            writer = decode_writer(path.read_bytes(), path.name)
            assert path == root / writer_key(writer.number)
            neutral = msgspec.structs.replace(writer, host="golden", pid=1, job="golden")
            path.write_bytes(encode_writer(neutral))
        files = [path for path in root.rglob("*") if path.is_file()]
        print(f"{name}: {len(files)} files, {sum(path.stat().st_size for path in files)} bytes")  # noqa: T201 - a script
    (HERE / "expected.json").write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
