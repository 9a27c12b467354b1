"""Jobs of two real ranks for ``faults.py``: started, limited, killed, stopped, and asked what they found."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fault_systems import SYSTEMS, State, System, make, process_group

LOAD_S, SAVE_S, HANG_S = 90.0, 90.0, 45.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["fault_systems", "torch.distributed.tensor", "torch.distributed.checkpoint", "ckpt.engine.save"]
)


class Outcome(NamedTuple):
    """How one rank ended: ``returned`` (value), ``raised`` (text), ``ended`` (exit code) or ``hung``."""

    how: str
    what: Any
    said: str  # on stderr


Act = Callable[..., Any]  # act(system, root, rank, ...) in a rank process


class Job:
    """Ranks that run ``act``; ``results`` waits for them and ends those that do not come back."""

    def __init__(
        self, act: Act, system: str, root: Path, *args: Any, world: int = 2, file_limit_nbytes: int | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-job-")
        folder = Path(self._folder.name)
        self.name = uuid.uuid4().hex[:12]
        self._ranks: list[tuple[Any, Connection, Path]] = []
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            said = folder / f"stderr-{rank}"
            process = _context.Process(
                target=_main,
                args=(theirs, folder, rank, world, self.name, file_limit_nbytes, act, system, root, args),
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours, said))

    def pid(self, rank: int) -> int:
        """A rank's process."""
        pid = self._ranks[rank][0].pid
        assert pid is not None
        return int(pid)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks (none named: to all)."""
        for rank in ranks or range(len(self._ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), number)

    def results(self, timeout_s: float) -> list[Outcome]:
        """One outcome for each rank; what has not ended by then is killed and counts as hung."""
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for process, ours, said in self._ranks:
            how: tuple[str, Any] = ("hung", f"nothing in {timeout_s:g} s")
            if ours.poll(max(0.0, deadline - time.monotonic())):
                try:
                    how = ours.recv()
                    process.join(max(1.0, deadline - time.monotonic()))
                    if process.is_alive():
                        how = ("hung", "done, but the process did not end")
                except EOFError:
                    process.join(5)
                    how = ("ended", process.exitcode)
            outcomes.append((*how, said))
        for process, ours, _ in self._ranks:
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()
        found = [Outcome(how, what, said.read_text() if said.exists() else "") for how, what, said in outcomes]
        self._folder.cleanup()
        return found


def _main(
    pipe: Connection,
    folder: Path,
    rank: int,
    world: int,
    job: str,
    file_limit_nbytes: int | None,
    act: Act,
    system: str,
    root: Path,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(CKPT_JOB=job, CKPT_LINGER_S="0.5")
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if file_limit_nbytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_nbytes, file_limit_nbytes))
    try:
        with process_group(str(folder / "rendezvous"), rank, world):
            outcome = ("returned", act(SYSTEMS[system](), root, rank, *args))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - what it was is the answer
        outcome = ("raised", f"{type(error).__name__}: {error}")
        if os.environ.get("FAULTS_TRACEBACK"):
            traceback.print_exc()
    pipe.send(outcome)


# -- what ranks do -------------------------------------------------------------------------


def save_all(system: System, root: Path, rank: int, names: list[tuple[str, int]], numel: int) -> None:
    """Save under each name the values of the step beside it, one after the other."""
    for name, step in names:
        system.save(root, name, make(step, rank, numel))


def load_newest(system: System, root: Path, rank: int, numel: int) -> list[list[float]]:
    """The distinct values of every tensor after loading the newest: one for a shard that is of one step and rank."""
    state: State = {name: torch.full_like(tensor, -1.0) for name, tensor in make(0, rank, numel).items()}
    system.load(root, state)
    return [torch.unique(tensor.view(torch.int32)).view(torch.float32)[:4].tolist() for tensor in state.values()]


def save_in_background(system: System, root: Path, rank: int, name: str, step: int, numel: int, then: str) -> bool:
    """An asynchronous save, and then: ``change`` the state at once, ``leave`` without waiting, or ``train`` on."""
    state = make(step, rank, numel)
    wait = system.async_save(root, name, state)
    if then == "leave":
        return True  # the caller of this function ends the process group and the script
    if then == "change":
        for tensor in state.values():
            tensor.fill_(-7.0)
    if then == "train":
        for _ in range(200):
            dist.all_reduce(torch.ones(1000))
    wait()
    return True


def save_and_go_on(system: System, root: Path, rank: int, names: list[tuple[str, int]], numel: int) -> None:
    """Asynchronous saves without ever looking at what became of them, with 0.3 s of training between."""
    for name, step in names:
        system.async_save(root, name, make(step, rank, numel))
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            torch.ones(1000).sum()
