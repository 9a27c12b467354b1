"""The first save of a new job against its later ones: a pair is a job of its own, with new processes and a keeper.

Such a job does what a training script does: it makes its model, takes a step, and enters a ``Checkpointer`` loop. When
the loop's first step is done, the ``Checkpointer`` knows what will be saved and has memory for it touched in the
background while the second step runs; then comes the first save. The third save (by then both arenas have been used) is
the steady one.
"""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch._dynamo  # noqa: F401 - a first training step imports it: so the forks need not
import torch.distributed as dist
from ranks import begin, slowest
from torch.distributed.device_mesh import init_device_mesh
from workload import Job, Size

import ckpt


def pairs(folder: Path, size: Size, count: int) -> list[dict[str, float]]:
    """``first``, ``steady`` and ``step`` seconds of ``count`` jobs, one after the other, each in a folder of its own.

    Every process of torchrun calls it, before it has a process group: the jobs' processes are forks of these, and a
    fork has none of the threads that a process group starts.
    """
    context = get_context("fork")
    found = []
    for number in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_job, args=(theirs, folder / f"first-{os.getppid()}-{number}", size))
        process.start()
        theirs.close()
        found.append(ours.recv())  # EOFError when it has died
        process.join()
    return found


def _job(pipe: Connection, folder: Path, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(CKPT_JOB=folder.name, CKPT_LINGER_S="1")
    begin(f"file://{folder}/rendezvous", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    job = Job(size, init_device_mesh("cpu", (dist.get_world_size(),)), seed=1)  # it has taken the first step
    stalls, step_s = [], 0.0
    with ckpt.Checkpointer(folder / "run", job.state, keep=ckpt.keep(last=1)) as checkpointer:
        for step in checkpointer.steps(total=2):
            if step == 2:
                started = time.perf_counter()
                job.train_step()
                step_s = time.perf_counter() - started
        for step in (2, 3, 4):
            if step > 2:
                job.change()
                dist.barrier()
                checkpointer.save(step)
            assert checkpointer.pending is not None
            stalls.append(checkpointer.pending.stall_s)
            checkpointer.drain()
    pipe.send(slowest({"first": stalls[0], "steady": stalls[-1], "step": step_s}))
    dist.destroy_process_group()
