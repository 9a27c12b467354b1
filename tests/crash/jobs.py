"""Jobs for tests to kill: ranks in processes of their own that do as they are told, and stop where they are told."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.keeper.client import KeeperClient, PendingTask
from ckpt.keeper.place import process_identity
from ckpt.reading.verify import verify_all
from ckpt.testing import store_env
from tests import members
from tests.keeper.conftest import TrainerError, is_alive, wait_for
from tests.ranks import PRELOAD

NBYTES = 1 << 18  # a rank's
LARGE_NBYTES = 36 << 20  # the copy has a middle, and so has the file
LONG_S = 30.0

# Where a rank stops within ``save``: no arena yet; an arena, but no task; a task, but not a byte; some bytes are
# announced; all are copied, which the keeper has not heard yet.
MOMENTS = ("asking", "granted", "begun", "copying", "copied")

# What the keeper is held at, when all of step 2 is staged: an operation of the store, and keys.
HELD = {
    "nothing is written": ("open_sink", "step-00000002-*.safetensors"),
    "a file is open": ("write", "step-00000002-*.safetensors"),
    "a file is not durable": ("close", "step-00000002-*.safetensors"),
    "files are durable": ("create", "step-00000002-*/part-*"),
    "parts are durable": ("create", "step-00000002-*/COMMIT"),
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
_numbers = itertools.count()


# -- in the rank's process -----------------------------------------------------------------


class Rank:
    """What a rank can be told to do. Its share of step N holds nothing but 10 N + rank."""

    def __init__(self, pipe: Connection, rank: int, world: int, run: str, nbytes: int) -> None:
        self.pipe = pipe
        self.rank = rank
        self.run = run
        self.local = torch.zeros(nbytes // 4)
        whole: torch.Tensor = self.local
        if world > 1:
            whole = DTensor.from_local(self.local, init_device_mesh("cpu", (world,)), [Shard(0)])
        self.state = {"w": whole}
        self.pendings: dict[int, ckpt.PendingSave] = {}

    def start(self, keep_last: int | None = None) -> int | None:
        """Open the run; the step that was restored."""
        self.checkpointer = ckpt.Checkpointer(self.run, self.state, keep=ckpt.keep(last=keep_last)).__enter__()
        self.client = keeper_client(self.rank)
        return self.checkpointer.restored_step

    def content(self) -> list[float]:
        """The least and the greatest number in this rank's share."""
        return extremes(self.local)

    def save(self, step: int) -> None:
        """Save, and wait until it is staged or has failed."""
        self.local.fill_(10 * step + self.rank)
        pending = self.pendings[step] = self.checkpointer.save(step)
        wait_for(lambda: pending.staged or pending.done, f"step {step} is staged", LONG_S)

    def result(self, step: int) -> str:
        """Wait until it is committed; its attempt."""
        return self.pendings[step].result(LONG_S).attempt

    def save_often(self, first: int, last: int) -> None:
        """Many steps, each committed before the next."""
        for step in range(first, last + 1):
            self.save(step)
            self.result(step)
            del self.pendings[step]

    def keeper(self) -> int:
        """The keeper's process."""
        return keeper_client(self.rank).keeper_pid

    def notice(self) -> None:
        """Wait until the client of a dead keeper knows it, and with it every save that was under way."""
        saves = self.pendings.values()
        wait_for(lambda: not self.client.alive and all(pending.done for pending in saves), "the client has noticed")

    def stop_at(self, moment: str) -> None:
        """Stop at a moment of the next save."""
        match moment:
            case "asking":
                self._stop(KeeperClient, "arena", lambda *_: threading.current_thread() is threading.main_thread())
            case "granted":
                self._stop(KeeperClient, "begin")
            case "begun":
                self._stop(KeeperClient, "begin", after=True)
            case "copying":
                self._stop(PendingTask, "ready", lambda task, nbytes: nbytes < task.end, after=True)
            case "copied":
                self._stop(PendingTask, "ready", lambda task, nbytes: nbytes >= task.end)

    def _stop(
        self, owner: type, name: str, when: Callable[..., bool] = lambda *_: True, *, after: bool = False
    ) -> None:
        """Have a method of the keeper's client wait, once, before or after it does its work."""
        method = getattr(owner, name)
        told = threading.Event()

        def stop() -> None:
            told.set()
            self.pipe.send(("stopped", None))
            assert self.pipe.recv() == "go on"

        def stopping(this: Any, *arguments: Any, **keywords: Any) -> Any:
            due = not told.is_set() and when(this, *arguments)
            if due and not after:
                stop()
            outcome = method(this, *arguments, **keywords)
            if due and after:
                stop()
            return outcome

        setattr(owner, name, stopping)

    def end(self) -> None:
        """Leave as a training loop does."""
        self.checkpointer.__exit__(None, None, None)


def _main(pipe: Connection, files: str, rank: int, world: int, run: str, nbytes: int, env: dict[str, str]) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.dup2(os.open(f"{files}.stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    torch.set_num_threads(1)
    if world > 1:
        method = f"file://{files}.rendezvous"
        dist.init_process_group("gloo", method, timedelta(seconds=LONG_S), world_size=world, rank=rank)
    this = Rank(pipe, rank, world, run, nbytes)
    name = ""
    while name != "end":
        name, arguments = pipe.recv()
        try:
            answer = ("ok", getattr(this, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - the test decides what was to be expected
            answer = (type(error).__name__, str(error))
        pipe.send(answer)
    if world > 1:
        dist.destroy_process_group()


# -- in the test's process -----------------------------------------------------------------


class Member(members.Member):
    """A rank's process, as its test sees it."""

    def __init__(self, files: str, rank: int, world: int, run: str, nbytes: int, env: dict[str, str]) -> None:
        super().__init__(_context, _main, files, rank, world, run, nbytes, env)

    def answer(self) -> Any:
        """What came of it. Raises TrainerError with what was raised there."""
        kind, value = self._receive()
        if kind != "ok":
            raise TrainerError(kind, value)
        return value

    def stopped(self) -> None:
        """Wait until it is where ``stop_at`` has it stop."""
        kind, value = self._receive()
        assert kind == "stopped", f"rank {self.rank} did not stop: {kind}: {value}\n{self.stderr()}"

    def go_on(self) -> None:
        """Let it go on from there."""
        self._pipe.send("go on")

    def do(self, name: str, *arguments: Any) -> Any:
        """Have it do something, and wait."""
        self.send(name, *arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()

    def _receive(self) -> tuple[str, Any]:
        assert self._pipe.poll(2 * LONG_S), f"rank {self.rank} does not answer\n{self.stderr()}"
        received: tuple[str, Any] = self._pipe.recv()
        return received


class Job:
    """All ranks of a job on this node, and their keeper."""

    def __init__(self, folder: Path, world: int, run: str, nbytes: int, env: dict[str, str]) -> None:
        self.run = run
        files = str(folder / f"start-{next(_numbers)}")
        self.ranks = [Member(files, rank, world, run, nbytes, env) for rank in range(world)]
        self.keeper_pid = 0

    def do(self, name: str, *arguments: Any) -> list[Any]:
        """Have all ranks do something at the same time; their answers. Raises the first rank's TrainerError."""
        for rank in self.ranks:
            rank.send(name, *arguments)
        return [rank.answer() for rank in self.ranks]

    def errors(self, name: str, *arguments: Any) -> list[TrainerError]:
        """The same, of which nothing can come but an error on every rank."""
        for rank in self.ranks:
            rank.send(name, *arguments)
        return [error_of(rank) for rank in self.ranks]

    def start(self, keep_last: int | None = None) -> int | None:
        """Open the run; the step that all ranks have restored, whole."""
        (restored,) = set(self.do("start", keep_last))
        self.keeper_pid = self.ranks[0].do("keeper")
        if restored is not None:
            assert self.do("content") == [[10.0 * restored + rank.rank] * 2 for rank in self.ranks]
        return restored

    def save(self, step: int) -> None:
        """Save a step and see it committed."""
        self.do("save", step)
        self.do("result", step)

    def kill_keeper(self) -> None:
        """SIGKILL."""
        os.kill(self.keeper_pid, 9)
        wait_for(lambda: not is_alive(self.keeper_pid), "the keeper is gone")

    def end(self) -> None:
        """Let all ranks leave; nothing of the job may stay."""
        self.do("end")
        for rank in self.ranks:
            rank.process.join(LONG_S)
            assert rank.process.exitcode == 0, rank.stderr()

    def kill(self) -> None:
        """SIGKILL to whatever is left of its ranks."""
        for rank in self.ranks:
            rank.kill()


def error_of(rank: Member) -> TrainerError:
    """The error that a rank answers with."""
    try:
        value = rank.answer()
    except TrainerError as error:
        return error
    raise AssertionError(f"rank {rank.rank} answered {value!r}, an error was expected")


class Gate:
    """Holds a keeper's store at one operation, until it is opened."""

    def __init__(self, folder: Path, operation: str, match: str) -> None:
        self._release, self._waiting = folder / "release", folder / "waiting"
        self.env = store_env(
            {"wrap": "blocking", "program": "keeper", "operation": operation, "match": match,
             "release": self._release, "waiting": self._waiting}
        )  # fmt: skip

    def reached(self) -> None:
        """Wait until the keeper stands before it."""
        wait_for(self._waiting.exists, "the keeper's store is held")

    def open(self) -> None:
        """Let it through, and all that come."""
        self._release.touch()


def check_steps(run: str, expected: Sequence[int], world: int) -> None:
    """These are the steps; each verifies, and is of one save throughout."""
    assert ckpt.steps(run) == list(expected)
    assert all(report.ok for report in verify_all(run))
    for step in expected:
        shares = ckpt.read(run, step=step)["w"].reshape(world, -1)
        assert [extremes(share) for share in shares] == [[10.0 * step + rank] * 2 for rank in range(world)]


def extremes(share: torch.Tensor) -> list[float]:
    """The least and the greatest number: the same, if the share is of one save."""
    return [float(extreme) for extreme in share.aminmax()]


def copied_nbytes(run: str, step: int) -> int:
    """Bytes of a step's data files."""
    total = 0
    for path in Path(run).glob(f"step-{step:08}-*/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def keepers_of(folder: Path) -> list[int]:
    """The keepers that live there."""
    found = []
    for path in folder.glob("ckpt/*.lock"):
        with contextlib.suppress(FileNotFoundError, ValueError):
            identity = path.read_text()
            pid = int(identity.partition(".")[0])
            if process_identity(pid) == identity:
                found.append(pid)
    return found
