"""What this process has of its job: a name for people, and a connection to the node's keeper."""

from __future__ import annotations

import os
import sys

from ckpt.keeper.client import KeeperClient

_clients: dict[int, KeeperClient] = {}  # rank -> this process's connection


def job_name() -> str:
    """What a writer record calls this job: the scheduler's or launcher's id, else the process."""
    for variable in ("CKPT_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        if os.environ.get(variable):
            return f"job {os.environ[variable]}"
    return f"process {os.getpid()}"


def keeper_client(rank: int) -> KeeperClient:
    """This process's connection to its keeper, which is started when there is none. Raises KeeperError."""
    client = _clients.get(rank)
    if client is None or not client.alive:
        if client is not None:
            print("ckpt: the keeper is gone; starting another one", file=sys.stderr)
            client.close(done=False)
        lost = client.lost if client is not None else []
        client = _clients[rank] = KeeperClient.connect(rank)
        for task in lost:  # other nodes wait for this one's part of it
            client.abandon(task.run, task.attempt, rank, task.world, "its keeper is gone, and with it the snapshot")
    return client


def has_spare_core(world: int) -> bool:
    """Whether the keeper can write while the ranks of this node copy without taking a core from one of them.

    Measured on 2 cores: with 1 rank, writing behind the copy made a save durable in two thirds of the time and
    the stall no longer; with 2 ranks it made the stall longer by a fifth. The stall goes first.
    """
    return (os.cpu_count() or 1) > int(os.environ.get("LOCAL_WORLD_SIZE", world))


def leave() -> None:
    """Tell the keepers that this process's ranks are done."""
    for client in _clients.values():
        client.close(done=True)
    _clients.clear()
