"""What a rank of the soak does: it saves every so often, writes down what it was told, and ends like any training."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from tests.ranks import PRELOAD

WORLD = 2
NBYTES = 1 << 20  # a rank's shard
GROUP_TIMEOUT_S = 20.0
PROGRESS_TIMEOUT_S = 3.0
KEEP_LAST = 3

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)


class Training(msgspec.Struct, frozen=True):
    """One start of the job, the same for all its ranks."""

    run: str
    journal: str  # where a rank writes what it was told, with its number at the end
    rendezvous: str
    stderr: str
    environment: dict[str, str]
    every_s: float
    on_error: str


def start(training: Training, rank: int) -> Any:
    """The rank's process."""
    process = context.Process(target=_train, args=(msgspec.json.encode(training), rank), name=f"soak-rank-{rank}")
    process.start()
    return process


class _Journal:
    """Lines of JSON, each whole in the file when it is written, whatever becomes of this process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, what: str, **more: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **more}).encode() + b"\n")


def _train(raw: bytes, rank: int) -> None:
    training = msgspec.json.decode(raw, type=Training)
    os.environ.update(training.environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.dup2(os.open(f"{training.stderr}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    torch.set_num_threads(1)
    journal = _Journal(f"{training.journal}-{rank}")
    try:
        method = f"file://{training.rendezvous}"
        dist.init_process_group("gloo", method, timedelta(seconds=GROUP_TIMEOUT_S), world_size=WORLD, rank=rank)
        _save_every(training, rank, journal)
    except ckpt.Preempted:
        journal.tell("stopped")
        sys.exit(ckpt.Preempted.exit_code)
    except ckpt.CkptError as error:
        journal.tell("raised", kind=type(error).__name__, message=str(error))
        sys.exit(error.exit_code)


def _save_every(training: Training, rank: int, journal: _Journal) -> None:
    local = torch.zeros(NBYTES // 4)
    state = {
        "shard": DTensor.from_local(local, init_device_mesh("cpu", (WORLD,)), [Shard(0)]),
        "replica": torch.zeros(1000),
        "count": 0,
        "mine": ckpt.per_rank([rank, 0]),
    }
    under_way: list[ckpt.PendingSave] = []

    def look() -> None:
        for pending in [pending for pending in under_way if pending.done]:
            under_way.remove(pending)
            if pending.committed:
                journal.tell("committed", step=pending.step, attempt=pending.attempt)
            else:
                journal.tell("failed", step=pending.step, attempt=pending.attempt, message=str(pending.error))

    with ckpt.Checkpointer(
        training.run, state, every=ckpt.every(steps=1), keep=ckpt.keep(last=KEEP_LAST),
        on_error=training.on_error, progress_timeout_s=PROGRESS_TIMEOUT_S,
    ) as checkpointer:  # fmt: skip
        restored = checkpointer.restored_step
        found = {float(x) for x in (*local.aminmax(), *state["replica"].aminmax(), state["count"])}
        journal.tell("restored", step=restored, uniform=found == {float(restored or 0)})
        due = time.monotonic()
        try:
            for step in checkpointer.steps(total=1 << 40):
                # What the loop saved when the last body had ended.
                if checkpointer.pending is not None and checkpointer.pending not in under_way:
                    under_way.append(checkpointer.pending)
                    journal.tell("saving", step=checkpointer.pending.step, stall_s=checkpointer.pending.stall_s)
                due = max(due + training.every_s, time.monotonic())
                while (left_s := due - time.monotonic()) > 0:
                    look()
                    time.sleep(min(left_s, 0.05))
                local.fill_(step)
                state["replica"].fill_(step)
                state["count"] = step
                state["mine"] = ckpt.per_rank([rank, step])
            if checkpointer.pending is not None and checkpointer.pending not in under_way:
                under_way.append(checkpointer.pending)
            checkpointer.drain()
        finally:
            look()
