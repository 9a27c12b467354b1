"""Ranks that fail on purpose: at a named moment of a verb, by SIGKILL, SIGSTOP, raising, or in storage that hangs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.engine import checkpointer, group, load, session
from ckpt.engine.bounded import BoundedStore
from ckpt.keeper.client import KeeperClient
from ckpt.processes import STOPPED, condition
from ckpt.reading import parallel
from ckpt.testing import BlockingStore, SlowStore
from tests import members
from tests.keeper.conftest import TrainerError, wait_for
from tests.ranks import PRELOAD

RANK_TIMEOUT_S = 1.5  # instead of 10
PROGRESS_TIMEOUT_S = 3.0
LONG_S = 60.0
NUMEL = 1 << 16

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)

# moment -> (who looks it up there, the name under which it is called, whether it goes wrong after the call)
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "save: before the copy": (session.Session, "_look", False),
    "save: opening the run": (session.Session, "_create_writer", False),
    "save: during the copy": (KeeperClient, "begin", True),
    "load: settling": (load, "settle", False),
    "load: choosing": (load, "_choose", False),
    "load: looking": (load, "wanted", False),
    "load: reading": (load, "fetch_all", False),
    "load: read": (load, "fetch_all", True),
    "preparing saves": (session, "prepare", False),
    "stepping": (checkpointer.Checkpointer, "_agree_to_stop", False),
}


class ArmedError(Exception):
    """What a rank raises on purpose."""


class Rank:
    """What a rank can be told to do. Its share of step N holds nothing but 10 N + rank."""

    def __init__(self, rank: int, world: int, run: str) -> None:
        self.rank, self.world, self.run = rank, world, run
        self.local = torch.zeros(NUMEL)
        mesh = init_device_mesh("cpu", (world,))
        self.state = {"w": DTensor.from_local(self.local, mesh, [Shard(0)])}
        self.pending: ckpt.PendingSave | None = None

    def arm(self, moment: str, fault: str) -> None:
        """Go wrong the next time that it comes there, once."""
        owner, name, after = MOMENTS[moment]
        method = getattr(owner, name)

        def armed(*arguments: Any, **keywords: Any) -> Any:
            setattr(owner, name, method)
            outcome = method(*arguments, **keywords) if after else None
            match fault:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raising":
                    raise ArmedError("on purpose")
            return outcome if after else method(*arguments, **keywords)

        setattr(owner, name, armed)

    def hang(self, operation: str, match: str, release: str) -> None:
        """From now on this rank's storage does not come back from some operations, until ``release`` exists."""
        store = session.session_of(self.run).run.store
        assert isinstance(store, BoundedStore)
        if isinstance(store.inner, BlockingStore):
            store.inner = store.inner.inner
        store.inner = BlockingStore(store.inner, release=release, operation=operation, match=match)

    def reads_ended(self) -> None:
        """Wait until no read that was left behind goes on."""
        wait_for(lambda: not any(reading.running for reading in parallel._hung), "reads end")

    def save(self, step: int) -> None:
        """Save."""
        self.local.fill_(10 * step + self.rank)
        self.pending = None
        self.pending = ckpt.save(self.run, step, self.state, progress_timeout_s=PROGRESS_TIMEOUT_S)

    def staged(self) -> None:
        """Wait until the keeper has what was saved last."""
        pending = self.pending
        assert pending is not None
        wait_for(lambda: pending.staged or pending.done, "it is staged")

    def result(self) -> int:
        """Wait until it is committed; the step."""
        assert self.pending is not None
        return self.pending.result(LONG_S).step

    def load(self) -> int:
        """Load the latest step, which is right; the step."""
        self.local.fill_(-1)
        step = ckpt.load(self.run, self.state, progress_timeout_s=PROGRESS_TIMEOUT_S).step
        assert self.local.eq(10 * step + self.rank).all()
        return step

    def enter(self) -> None:
        """Enter a Checkpointer, as a job that starts."""
        self.checkpointer = ckpt.Checkpointer(self.run, self.state, progress_timeout_s=PROGRESS_TIMEOUT_S)
        self.checkpointer.__enter__()

    def step(self) -> None:
        """A few training steps, none of which is saved."""
        for count, _ in enumerate(self.checkpointer.steps((self.checkpointer.restored_step or 0) + 1000)):
            if count == 3:
                break

    def all_reduce(self) -> float:
        """The training's own collective."""
        one = torch.ones(1)
        dist.all_reduce(one)
        return float(one)

    def elsewhere(self, hosts: list[str], silence_s: float) -> None:
        """Look as if the ranks were on these hosts; a rank of which nothing is heard is given up sooner."""
        mine = msgspec.structs.replace(group.this_process(), host=hosts[self.rank], pids=hosts[self.rank])
        group.this_process = lambda: mine
        group.SILENCE_TIMEOUT_S = silence_s
        group._SIGN_S = 0.1  # as if much time went by

    def slow(self, delay_s: float) -> None:
        """From now on each operation of this rank's storage takes so long."""
        store = session.session_of(self.run).run.store
        assert isinstance(store, BoundedStore)
        store.inner = SlowStore(store.inner, delay_s=delay_s, operation="reading")


def _main(pipe: Connection, files: str, rank: int, world: int, run: str, env: dict[str, str]) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.dup2(os.open(f"{files}.stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    torch.set_num_threads(1)
    group.RANK_TIMEOUT_S = RANK_TIMEOUT_S
    dist.init_process_group(
        "gloo", f"file://{files}.rendezvous", timedelta(seconds=LONG_S), world_size=world, rank=rank
    )
    this = Rank(rank, world, run)
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            return  # as a script ends: ckpt's own exit runs, and nothing is destroyed by hand
        try:
            answer = ("ok", getattr(this, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - the test decides what was to be expected
            answer = (type(error).__name__, str(error))
        pipe.send(answer)


class Member(members.Member):
    """A rank's process, as its test sees it."""

    def __init__(self, files: str, rank: int, world: int, run: str, env: dict[str, str]) -> None:
        super().__init__(_context, _main, files, rank, world, run, env)

    def answer(self, within_s: float = LONG_S) -> Any:
        """What came of it. Raises TrainerError with what was raised there."""
        assert self._pipe.poll(within_s), f"rank {self.rank} gave no answer in {within_s} s\n{self.stderr()}"
        kind, value = self._pipe.recv()
        if kind != "ok":
            raise TrainerError(kind, value)
        return value

    def error(self, within_s: float = LONG_S) -> TrainerError:
        """The error that it answers with."""
        try:
            value = self.answer(within_s)
        except TrainerError as error:
            return error
        raise AssertionError(f"rank {self.rank} answered {value!r}, an error was expected")

    def stopped(self) -> None:
        """Wait until it has stopped itself."""
        wait_for(lambda: condition(self.pid) == STOPPED, f"rank {self.rank} is stopped")

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


class RankJob:
    """All ranks of a job, and their keeper."""

    def __init__(self, folder: Path, world: int, run: str, env: dict[str, str]) -> None:
        name = f"job-{uuid.uuid4().hex[:12]}"
        environment = {"XDG_RUNTIME_DIR": str(folder), "CKPT_JOB": name, "CKPT_LINGER_S": "0.2", **env}
        self.run = run
        self.members = [Member(str(folder / name), rank, world, run, environment) for rank in range(world)]

    def do(self, name: str, *arguments: Any) -> list[Any]:
        """Have all ranks do something at the same time; their answers. Raises the first rank's TrainerError."""
        for member in self.members:
            member.send(name, *arguments)
        return [member.answer() for member in self.members]

    def survivors(self, victim: Member) -> list[Member]:
        """All but one."""
        return [member for member in self.members if member is not victim]

    def end(self, victims: tuple[Member, ...] = ()) -> float:
        """Let all others leave by themselves; how long the slowest took."""
        started = time.monotonic()
        for member in self.members:
            if member not in victims:
                member.send("end")
        for member in self.members:
            if member not in victims:
                member.process.join(LONG_S)
                assert member.process.exitcode == 0, member.stderr()
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL to whatever is left of its ranks."""
        for member in self.members:
            with contextlib.suppress(ValueError):
                member.process.kill()
                member.process.join()


Jobs = Callable[..., RankJob]
