"""One model on many ranks: copied (DDP) or cut into pieces (FSDP2).

Both take the same global batch and both return the same mathematical step. What differs is what a rank
holds: under ``ddp`` the whole model and optimizer, under ``fsdp`` one W-th of every tensor, gathered
block by block when a block runs and let go again after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from trainer.model import GPT

__all__ = ["Place", "clip_gradients", "computing_in", "mean_over_ranks", "process_group", "shared_gradients", "spread"]


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank among ``world`` ranks, and the device it computes on."""

    rank: int
    world: int
    device: torch.device


@contextmanager
def process_group(device: str) -> Iterator[Place]:
    """Join the other ranks, or use the process group there is, and leave it as it was found.

    ``device`` is "auto", "cpu" or "cuda". Without torchrun the group has one member, so that there is one
    path through the trainer and not two.
    """
    here = _choose_device(device)
    if dist.is_initialized():
        yield Place(dist.get_rank(), dist.get_world_size(), here)
        return
    alone = "WORLD_SIZE" not in os.environ
    if here.type == "cpu" and not alone and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks are the threads; more of them only wait for each other
    # One member needs no meeting place over the network.
    store = dist.HashStore() if alone else None  # type: ignore[attr-defined]  # public, but torch's stubs hide it
    dist.init_process_group(
        "nccl" if here.type == "cuda" else "gloo",
        device_id=here if here.type == "cuda" else None,
        store=store,
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
    )
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), here)
    finally:
        dist.destroy_process_group()


def _choose_device(device: str) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ckpt.BadInputError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    # Some kernels add in whatever order their threads finish: a run that is to come again bit for bit does
    # without them where it can. cuBLAS reads its variable when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(here)
    return here


def spread(model: GPT, place: Place, *, parallel: str, bf16: bool) -> nn.Module:
    """Wrap ``model`` for ``parallel`` ("ddp" or "fsdp"); call it before the optimizer is made.

    Every rank passes the same freshly drawn weights. With ``bf16`` FSDP gathers and computes in bfloat16 while
    its own pieces, the gradients' sum and the optimizer stay in float32; DDP does that by autocast.
    """
    model = model.to(place.device)
    if parallel == "ddp":
        return _first_pass(
            DistributedDataParallel(model, device_ids=[place.device] if place.device.type == "cuda" else None)
        )
    mesh = init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("shard",))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the root: embedding, last norm, head
    return model  # the same object, whose class is now an FSDPModule too


def _first_pass(model: DistributedDataParallel) -> DistributedDataParallel:
    """Run one token through ``model`` and forget its gradients, so that all steps that count add alike.

    DDP packs gradients into buckets, and packs them anew after the first backward pass it sees. Where a
    gradient lies in its bucket decides in which order more than two ranks add it up, and so its last
    bit. A resumed process would do its first step with the first packing, and the run that was never
    stopped did that very step with the second. After this pass both only ever use the second.
    """
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device)).sum().backward()
    model.zero_grad()
    return model


def computing_in(model: nn.Module, device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    """The context of the forward pass: autocast for DDP in bf16; FSDP's policy needs none."""
    if bf16 and not isinstance(model, FSDPModule):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def shared_gradients(model: nn.Module, *, now: bool) -> AbstractContextManager[object]:
    """The context of a forward and backward pass whose gradients meet the other ranks' only if ``now``.

    While gradients accumulate there is nothing to gain from summing them over the ranks after every
    piece: once, after the last, is enough.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    if isinstance(model, DistributedDataParallel) and not now:
        return model.no_sync()
    return nullcontext()


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients down until their common norm is at most ``limit``; the norm as it was before.

    The norm is over the whole model: for FSDP each rank adds the squares of its pieces, and the sum
    (a DTensor) meets the other ranks' here.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm)


def mean_over_ranks(value: Tensor) -> float:
    """The mean of one number of every rank, the same bits on all of them."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()
