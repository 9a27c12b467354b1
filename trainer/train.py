"""Train a GPT on the standard library's source, and survive whatever kills it.

One process, or many::

    python -m trainer --run runs/a --steps 40 --every 10
    torchrun --nproc-per-node 2 -m trainer -- --run runs/a --steps 40 --every 10 --parallel fsdp

Resuming is no option of its own: start the same command again. It goes on after the newest committed step
with the same model, optimizer, schedule, random numbers and data, so the losses are those of a run that
was never stopped, bit for bit. Another number of ranks may go on too; only the rounding of sums differs then.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ckpt
from trainer.data import Windows, library_text
from trainer.journal import Journal, complain
from trainer.model import GPT, GPTConfig
from trainer.options import Options, parse
from trainer.parallel import (
    Place,
    clip_gradients,
    computing_in,
    mean_over_ranks,
    process_group,
    shared_gradients,
    spread,
)

__all__ = ["Job", "assemble", "main", "train"]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv``, train, and return the exit code; a process group that is there already is used and kept."""
    options = parse(argv, about=__doc__)
    try:
        with process_group(options.device) as place:
            train(options, place)
    except ckpt.CkptError as error:
        # What stops all ranks at once is said by rank 0 alone; a save may fail on one rank only.
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or isinstance(error, (ckpt.KeeperError, ckpt.SaveFailedError, ckpt.StoreError)):
            complain(f"rank {rank}: {error}" if rank else str(error))
        return error.exit_code
    return 0


def train(options: Options, place: Place) -> None:
    """The whole of a training job, from drawing the weights to the last committed step."""
    job = assemble(options, place)
    every, keep = ckpt.every(steps=options.every), ckpt.keep(last=options.keep)
    with Journal(place, loss_log=options.loss_log, events=options.events) as journal:
        with ckpt.Checkpointer(  # restores the state
            options.run, job.state, every=every, keep=keep, overlap=options.overlap
        ) as checkpointer:
            journal.begin(checkpointer.restored_step)
            batches = job.loader.forever()  # epoch after epoch, from the restored position on
            for step in checkpointer.steps(total=options.steps):  # restores the random numbers; saves when due
                journal.saves(checkpointer)
                tokens = next(batches).to(place.device)  # (B, T + 1): this rank's share of the global batch
                rate = float(job.scheduler.get_last_lr()[0])
                loss, norm = train_step(job.model, job.optimizer, tokens, options)
                job.scheduler.step()
                journal.step(step, options.steps, loss=loss, norm=norm, rate=rate, tokens=options.tokens_per_step)
                if options.kill is not None and options.kill.due(place.rank, step, checkpointer.restored_step):
                    journal.event("killed", any_rank=True, step=step)
                    options.kill.fire()
        journal.saves(checkpointer)  # the last one was committed on leaving the block above


@dataclass(frozen=True)
class Job:
    """What is trained, and what trains it: all that a checkpoint must bring back."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    loader: ckpt.ResumableLoader

    @property
    def state(self) -> dict[str, Any]:
        """What is saved and restored, by the names under which it is stored."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.loader}


def assemble(options: Options, place: Place) -> Job:
    """Everything as it is before the first step, decided by the seed alone."""
    torch.manual_seed(options.seed)  # every rank draws the same weights
    config = GPTConfig(options.layers, options.width, options.heads, dropout=options.dropout)
    model = spread(GPT(config), place, parallel=options.parallel, bf16=options.bf16)
    optimizer = make_optimizer(model, options.lr)
    scheduler = LambdaLR(optimizer, partial(warmup_then_cosine, warmup=options.warmup, total=options.steps))
    windows = Windows(library_text(), options.sequence_length)
    loader = ckpt.ResumableLoader(windows, global_batch_size=options.batch_size, seed=options.seed)
    seed_generators(options.seed + 1 + place.rank)  # from here on each rank draws numbers, and drops out, on its own
    return Job(model, optimizer, scheduler, loader)


def seed_generators(seed: int) -> None:
    """Python's, torch's and (where it is installed) numpy's: whatever draws numbers draws the same ones again."""
    random.seed(seed)
    torch.manual_seed(seed)
    if find_spec("numpy") is not None:
        import_module("numpy.random").seed(seed % 2**32)


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, options: Options) -> tuple[float, float]:
    """One optimizer step on this rank's ``tokens`` (B, T + 1): the loss over all ranks, and the gradient's norm.

    The batch may be worked off in ``options.accumulate`` pieces, whose gradients add up to the batch's own. The
    last batch of an epoch may be short and its shares of unequal size, so every sequence gets its weight in the
    whole batch; each rank runs as many pieces as the others, though one of them may be empty.
    """
    model.train()
    pieces = tokens.tensor_split(options.accumulate)  # (B / accumulate, T + 1) each
    sequences = mean_over_ranks(torch.tensor(float(len(tokens)), device=tokens.device))
    share = torch.zeros((), device=tokens.device)  # of the loss: its mean over the ranks is the loss
    for number, piece in enumerate(pieces, start=1):
        inputs, targets = piece[:, :-1], piece[:, 1:]  # (B, T) each: predict every next token
        with shared_gradients(model, now=number == len(pieces)):
            with computing_in(model, tokens.device, bf16=options.bf16):
                logits = model(inputs)  # (B, T, V)
            surprise = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            loss = surprise / (sequences * options.sequence_length)
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        share += loss.detach()
    norm = clip_gradients(model, options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(share), norm


def make_optimizer(model: nn.Module, lr: float) -> AdamW:
    """AdamW in two groups: matrices decay, vectors (the norms' scales) do not."""
    parameters = list(model.parameters())
    return AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
    )


def warmup_then_cosine(done: int, *, warmup: int, total: int) -> float:
    """The factor on the learning rate after ``done`` steps: up in a line, then down a half cosine to a tenth."""
    if done < warmup:
        return (done + 1) / (warmup + 1)
    progress = min(1.0, (done - warmup) / max(1, total - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
