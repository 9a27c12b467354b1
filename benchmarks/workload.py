"""What the benchmarks save: GPT-2 under FSDP2 (or DDP) with an AdamW that has taken a step, and its training step."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW


@dataclass(frozen=True)
class Size:
    """The shape of a model, and the tokens in each rank's share of a batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int


SIZES = {
    "full": Size(layers=12, width=768, heads=12, vocabulary=50257, tokens=64),  # GPT-2 small: 1.49 GB with two moments
    "quick": Size(layers=10, width=512, heads=8, vocabulary=8192, tokens=32),  # 0.43 GB
    "tiny": Size(layers=2, width=128, heads=2, vocabulary=4001, tokens=16),  # 11 MB: does it run at all
}


class Block(nn.Module):
    """Causal attention and a two-layer network, each adding to the residual stream (batch, tokens, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """The stream before the block to the stream after it."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class GPT2(nn.Module):
    """The language model; its table of tokens both reads and scores them, as one parameter."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(1024, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, tokens + 1) to the mean loss of predicting each next one."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Job:
    """A model, its optimizer and a batch: what trains, and what is saved."""

    def __init__(self, size: Size, mesh: DeviceMesh | None, seed: int) -> None:
        """Cut over ``mesh`` by FSDP2; None: whole on every rank, under DDP. It has taken one training step."""
        torch.manual_seed(seed)  # the same weights on every rank
        model = GPT2(size)
        self.sharded = mesh is not None
        if mesh is not None:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model: nn.Module = model if self.sharded else DistributedDataParallel(model)
        # The kernel that a CPU's user would choose; the plain loop takes several times as long over DTensors.
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(size.vocabulary, (1, size.tokens + 1))
        self.train_step()

    @property
    def state(self) -> dict[str, Any]:
        """What is handed to ckpt."""
        return {"model": self.model, "optimizer": self.optimizer}

    def train_step(self) -> None:
        """Forward, backward, optimizer step."""
        loss = self.model(self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named_tensors(self) -> dict[str, Tensor]:
        """This rank's own tensors by name: parameters, moments, step counts; DTensors as their local shards."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = _local(parameter)
            for kind, value in self.optimizer.state[parameter].items():
                found[f"{name}.{kind}"] = _local(value)
        return found

    def tensors(self) -> list[Tensor]:
        """The same without their names."""
        return list(self.named_tensors().values())

    def change(self) -> None:
        """Other values everywhere, so that no save finds the bytes of the one before."""
        for tensor in self.tensors():
            tensor.mul_(1.001)

    def needed_nbytes(self) -> int:
        """What this rank holds, and a load has to bring."""
        return nbytes_of(self.tensors())

    def unique_nbytes(self) -> int:
        """What all ranks hold together, with what several of them have counted once."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return nbytes_of(self.model.parameters()) + nbytes_of(moments)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements; of a DTensor's whole, not of its shard."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local.detach()
    return tensor.detach()


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line of a benchmark that runs this job: also which size of it, and where it may write."""
    parser.add_argument("--size", choices=SIZES, help="of the model (default full; with --quick quick)")
    parser.add_argument("--dir", type=Path, default=Path("bench-out"), help="a folder to make, use and remove again")
    args = parser.parse_args()
    args.size = args.size or ("quick" if args.quick else "full")
    return args
