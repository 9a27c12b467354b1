"""Real ranks for tests: W processes under gloo, forked from a server that has torch imported already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch._dynamo",
    "ckpt.engine.checkpointer",
]
TIMEOUT_S = 100.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def run_ranks(
    world: int,
    target: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    dies: Collection[int] = (),
    job: str | None = None,
    process_group: bool = True,
) -> list[Any]:
    """``target(rank, world, *args)`` on ``world`` ranks of one gloo group; gives what each returned.

    ``target`` is a module-level function. A rank that raises fails the test with its traceback, and
    so does one that ends by a signal, unless it is in ``dies`` (its result is then None). ``job``
    names the job (ranks of one job on one node share a keeper); each call is a job of its own by default.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        environment = {"CKPT_JOB": job or f"test-{uuid.uuid4().hex[:12]}", "CKPT_LINGER_S": "2", **(env or {})}
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            rendezvous = f"file://{folder}/rendezvous" if process_group else None
            process = _context.Process(target=_main, args=(theirs, rendezvous, rank, world, environment, target, args))
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            outcomes = _collect([ours for _, ours in started], dies)
            for rank, (process, _) in enumerate(started):
                process.join(TIMEOUT_S)
                assert not process.is_alive(), f"rank {rank} did not end"
        finally:
            for process, ours in started:
                if process.is_alive():
                    process.kill()
                    process.join()
                ours.close()
    failures = [text for kind, text in outcomes if kind == "raised"]
    assert not failures, "\n".join(failures)
    ended = {rank for rank, (kind, _) in enumerate(outcomes) if kind == "ended"}
    assert ended == set(dies), f"ranks {sorted(ended)} ended without an answer, expected {sorted(dies)}"
    return [value for _, value in outcomes]


def _collect(pipes: list[Connection], dies: Collection[int]) -> list[tuple[str, Any]]:
    outcomes: list[tuple[str, Any] | None] = [None] * len(pipes)
    while None in outcomes:
        waiting = [pipe for pipe, outcome in zip(pipes, outcomes, strict=True) if outcome is None]
        ready = wait(waiting, timeout=TIMEOUT_S)
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        assert ready, f"ranks {missing} gave no answer in {TIMEOUT_S} s"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank] = ("ended", None)
        if any(o is not None and o[0] == "raised" for o in outcomes):
            break  # the others may wait for this one for ever
        if any(o is not None and o[0] == "ended" and rank not in dies for rank, o in enumerate(outcomes)):
            break
    return [outcome or ("stopped", None) for outcome in outcomes]


def _main(
    pipe: Connection,
    rendezvous: str | None,
    rank: int,
    world: int,
    environment: Mapping[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    outcome: tuple[str, Any]
    try:
        if rendezvous is not None:
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        try:
            outcome = ("returned", target(rank, world, *args))
        finally:
            if rendezvous is not None and sys.exc_info()[0] is None:
                dist.destroy_process_group()
    except SystemExit as error:
        outcome = ("returned", error)
    except BaseException:  # noqa: BLE001 - the test shows it
        outcome = ("raised", f"rank {rank}: {traceback.format_exc()}")
    with contextlib.suppress(BrokenPipeError):
        # Plain pickle: a Connection's own would pass tensors in shared memory, which goes with this process.
        pipe.send_bytes(pickle.dumps(outcome))
