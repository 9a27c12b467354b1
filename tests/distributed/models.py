"""A small model in every wrapping, and its state gathered whole, for tests on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Uneven sizes, a buffer, and dropout, so that shards are uneven and random states matter."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 5) to (N, 3)."""
        return self.second(self.dropout(torch.relu(self.first(x)))) * self.scale


def build(kind: str, world: int, seed: int = 0, width: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """AdamW and the model wrapped as ``plain``, ``ddp``, ``fsdp``, ``tp``, and of 4 ranks ``fsdp_tp`` or ``hsdp``."""
    torch.manual_seed(seed)
    model: nn.Module = Net(width)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif kind in {"tp", "fsdp_tp"}:
        shape = (world,) if kind == "tp" else (2, world // 2)
        names = ("tp",) if kind == "tp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if kind == "fsdp_tp":
            fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, steps: int, seed: int = 5) -> None:
    """A few steps on each rank's share of fixed batches."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step)
        batch = torch.randn(12, 5, generator=generator)
        share = batch.chunk(world)[rank]
        model(share).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's global value, any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and optimizer tensor, whole, by canonical name. Collective."""
    names, found = {}, {}
    for name, parameter in model.named_parameters():
        names[parameter] = name.removeprefix("module.")
        found[names[parameter]] = whole(parameter.detach()).clone()
    for name, buffer in model.named_buffers():
        found[name.removeprefix("module.")] = whole(buffer).clone()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[parameter]}/{key}"] = whole(value).clone()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def barrier() -> None:
    """All ranks here."""
    dist.barrier()
