"""A job that saves one step after the other, killed at random moments and started again, again and again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from ckpt.keeper.client import settle
from ckpt.keeper.place import process_identity
from ckpt.run import Run
from tests.ranks import PRELOAD

ELEMENTS = (1 << 20) // 4  # of each rank
LONG_S = 60.0
LAUNCHER_S = 0.1  # so soon a launcher ends the other ranks when one has died


def save_on(told: Connection, run: str, environment: dict[str, str], rank: int, world: int, rendezvous: str) -> None:
    """Restore, then save one step after the other, telling what is staged and what is committed.

    When its keeper has gone it saves once more, with another one, and ends.
    """
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.dup2(os.open(f"{run}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    local = torch.zeros(ELEMENTS)
    state: dict[str, Any] = {"w": local}
    if world > 1:
        dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=30), world_size=world, rank=rank)
        whole = DTensor.from_local(local, init_device_mesh("cpu", (world,)), [Shard(0)])
        state = {"w": whole, "same": torch.zeros(1000), "step": 0}
    _save_on(told, run, rank, local, state)
    if world > 1:
        dist.destroy_process_group()


def _save_on(told: Connection, run: str, rank: int, local: torch.Tensor, state: dict[str, Any]) -> None:
    # Saves that went with the old keeper, and that nobody was told of before the last save, are told at the end.
    with _without_keeper(), ckpt.Checkpointer(run, state, keep=ckpt.keep(last=3)) as checkpointer:
        step = checkpointer.restored_step or 0
        assert torch.equal(local, torch.full((ELEMENTS,), float(step)))
        keeper = keeper_client(rank).keeper_pid
        told.send(("restored", checkpointer.restored_step))
        told.send(("keeper", keeper))
        pendings: list[ckpt.PendingSave] = []
        gone = False
        while True:
            step += 1
            local.fill_(step)
            if "same" in state:
                state["same"].fill_(step)
                state["step"] = step
            saved = False
            with _without_keeper():
                pendings.append(checkpointer.save(step))
                if gone:
                    pendings[-1].result(LONG_S)
                saved = True
            if gone and not _any(not saved):
                told.send(("saved with another keeper", step))
                return
            for pending in pendings[-3:]:
                if pending.committed:
                    told.send(("committed", pending.step))
                elif pending.staged:
                    told.send(("staged", pending.step))
            gone = _any(keeper_client(rank).keeper_pid != keeper)


@contextlib.contextmanager
def _without_keeper() -> Iterator[None]:
    """Gets over the end of a keeper, this rank's or another one's: that error has the same exit code."""
    try:
        yield
    except ckpt.CkptError as error:
        if error.exit_code != ckpt.KeeperError.exit_code:
            raise


def _any(flag: bool) -> bool:
    """Whether it is so on any rank, for all of them."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


@dataclass
class Survival:
    """What a run of kills came to."""

    newest: int = 0
    cut_short: int = 0  # attempts that no kill let become a step
    rounds: dict[str, int] = field(default_factory=dict)  # how often each was killed


def kill_again_and_again(
    run: str, rounds: int, seed: int, modes: Sequence[str], world: int = 1, longest_s: float = 0.2
) -> Survival:
    """One job, killed and started again: its latest step must verify, be of one step, and never go back.

    A mode names who is killed, one right after the other: "keeper", "rank 0", "rank 1". When a rank has died, the
    others are ended as a launcher does; when a keeper has, they go on with another one.
    """
    environment = {"CKPT_JOB": run, "CKPT_LINGER_S": "10", "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    survival, moments = Survival(), random.Random(seed)
    keepers: dict[int, str] = {}
    attempts = set()
    for number in range(rounds):
        mode = modes[number % len(modes)]
        round_ = _Round(run, environment, world, f"{run}.rendezvous-{number}")
        try:
            restored, keeper = round_.started()
            assert (restored or 0) == survival.newest, f"round {number} ({mode})"
            keepers[keeper] = process_identity(keeper)
            time.sleep(moments.uniform(0.005, longest_s))
            round_.kill(mode.split(", "), keeper, moments.uniform(0, LAUNCHER_S))
            heard = round_.end(dies=mode != "keeper")
        except BaseException:
            print(Path(f"{run}.stderr").read_text()[-3000:])  # noqa: T201 - shown when the test fails
            raise
        finally:
            round_.close()
        assert settle(run, LONG_S) == []
        promised = _promised(heard, keeper_lives="keeper" not in mode)
        assert mode != "keeper" or all(told[-1][0] == "saved with another keeper" for told in heard), (number, heard)
        before, survival.newest = survival.newest, ckpt.latest(run) or 0
        assert survival.newest >= max(before, *promised, 0), (number, mode, heard)
        if survival.newest:
            assert ckpt.verify(run).ok, (number, mode)
            found = ckpt.read(run)
            for name in ("w", "same", "step") if world > 1 else ("w",):
                same = torch.as_tensor(found[name]) == survival.newest
                assert same.all(), f"round {number} ({mode}): {name} of step {survival.newest} is mixed"
        attempts |= {state.attempt for state in Run.open(run).survey().steps if state.commit is None}
        survival.rounds[mode] = survival.rounds.get(mode, 0) + 1
    for pid, identity in keepers.items():
        if identity and process_identity(pid) == identity:
            os.kill(pid, signal.SIGKILL)
    survival.cut_short = len(attempts)
    return survival


def _promised(heard: Sequence[Sequence[tuple[str, Any]]], *, keeper_lives: bool) -> set[int]:
    """Steps that must be there: any rank was told so, or all had them staged, and the keeper lives."""
    promised = {step for told in heard for kind, step in told if kind in {"committed", "saved with another keeper"}}
    if keeper_lives:
        promised |= set.intersection(*({step for kind, step in told if kind == "staged"} for told in heard))
    return promised


class _Round:
    """One start of all ranks."""

    def __init__(self, run: str, environment: dict[str, str], world: int, rendezvous: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._ranks = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=save_on, args=(theirs, run, environment, rank, world, rendezvous))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def started(self) -> tuple[int | None, int]:
        """The step that all ranks have restored, and the keeper's process."""
        told = []
        for _, ours in self._ranks:
            assert ours.poll(LONG_S), "a rank does not start"
            told.append((ours.recv()[1], ours.recv()[1]))
        assert len(set(told)) == 1, told
        return told[0]

    def kill(self, names: Sequence[str], keeper: int, launcher_s: float) -> None:
        """SIGKILL, and then what the launcher does."""
        for name in names:
            os.kill(keeper if name == "keeper" else self._ranks[int(name.split()[1])][0].pid, signal.SIGKILL)
        if any(name != "keeper" for name in names):
            time.sleep(launcher_s)
            for process, _ in self._ranks:
                process.kill()

    def end(self, *, dies: bool) -> list[list[tuple[str, Any]]]:
        """All that each rank has told; they end by themselves, unless they have been killed."""
        heard = []
        for process, ours in self._ranks:
            told: list[tuple[str, Any]] = []
            with contextlib.suppress(EOFError):
                while ours.poll(LONG_S):
                    told.append(ours.recv())
            process.join(LONG_S)
            # Whoever lost its peer may have raised before the launcher came.
            assert process.exitcode == 0 or dies, f"a rank ended with {process.exitcode}"
            heard.append(told)
        return heard

    def close(self) -> None:
        """Leave no rank behind."""
        for process, ours in self._ranks:
            process.kill()
            process.join(LONG_S)
            ours.close()
