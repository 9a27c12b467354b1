"""ckpt's own gloo group: collectives in the caller's thread, which look after the other ranks while they wait.

Gloo alone tells of a dead process by its address, of a stopped one after its time-out, and of a slow one as of a
stopped one. So whoever waits looks, twice a second, how the ranks of its own node fare; what one finds, all learn
through the job's store. A collective that goes well touches neither.

Gloo cannot be made to give up. A group on which a collective has failed is left behind with its sockets and two
threads, and the ranks make another one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ckpt.engine.board import Board, BoardError
from ckpt.errors import RankError
from ckpt.keeper.saves import name_ranks
from ckpt.processes import DEAD, STOPPED, ProcessName, condition, this_process

RANK_TIMEOUT_S = 10.0  # so long a rank may be stopped while others wait for it: a debugger, a container that is frozen
SILENCE_TIMEOUT_S = 1800.0  # so long a rank that lives, or cannot be seen from here, may keep the others waiting
CONNECT_TIMEOUT_S = 60.0  # of gloo, when all ranks are there
LOOK_S = 0.5
NAMED = 3  # so many ranks are named with their processes

_NEVER = timedelta(days=30)  # gloo's own time-out of a collective
_PASSED = "passed"
_BOARD_PER_S = 250  # looks at the board that all waiting ranks together take a second
_SIGNS_PER_S = 100  # signs of progress, likewise
_SIGN_S = 10.0
_STORE_WAKES_S = 0.1
_POLL_FIRST_S, _POLL_LAST_S = 0.002, 0.2


class Verdict(msgspec.Struct, frozen=True):
    """Why a collective has failed, and of which rank it is the fault (-1: of none in particular)."""

    text: str
    rank: int
    number: int  # of the collective


class Group:
    """All ranks. ``doing`` says what for, in messages: the verb that is under way."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        number: int,
        peers: Sequence[ProcessName] = (),
        doing: str = "making the process group",
    ) -> None:
        """Collective. ``peers``: the ranks' processes as far as they are known. RankError when not all come."""
        self.rank, self.world = rank, world
        self.number = number
        self.doing = doing
        self.peers = tuple(peers)
        self.failed: str | None = None  # why it cannot be used any more
        self._collectives = 0
        self._signed_at = time.monotonic()
        prefixed = PrefixStore(f"ckpt/{number}", store)
        self._board = Board(prefixed)
        self._meet()
        try:
            self._gloo: Any = dist.ProcessGroupGloo(
                PrefixStore("gloo", prefixed), rank, world, timedelta(seconds=CONNECT_TIMEOUT_S)
            )
        except RuntimeError as error:
            self._fail(0, f"the ranks did not get connected: {error}", -1)
        # Its destructor would wait for the collectives under way, and one with a stopped peer may take for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
        mine = msgspec.json.encode(this_process())
        self.peers = tuple(msgspec.json.decode(raw, type=ProcessName) for raw in self.all_gather_bytes(mine))

    # -- collectives -----------------------------------------------------------------------

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """The greatest of each number over all ranks."""
        return self.start_all_reduce_max(numbers)()

    def start_all_reduce_max(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """The same, begun; what is returned waits for it."""
        number = self._next()
        came = time.time_ns()
        told = torch.tensor([*numbers, came, -came], dtype=torch.int64)
        work = self._gloo.allreduce([told], dist.ReduceOp.MAX, _NEVER)

        def wait() -> list[int]:
            waited_s = self._wait(work, number)
            *largest, last, first = told.tolist()
            self._check_late(number, max(waited_s, (last + first) / 1e9))
            return largest

        return wait

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        number = self._next()
        heads = [torch.empty(2, dtype=torch.int64) for _ in range(self.world)]
        head = torch.tensor([len(mine), time.time_ns()], dtype=torch.int64)
        waited_s = self._wait(self._gloo.allgather(heads, head, _NEVER), number)
        sizes, came = zip(*(each.tolist() for each in heads), strict=True)
        self._check_late(number, max(waited_s, (max(came) - min(came)) / 1e9))

        number = self._next()
        longest = max(1, *sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        self._check_late(number, self._wait(self._gloo.allgather(bodies, padded, _NEVER), number))
        return [body[:size].numpy().tobytes() for body, size in zip(bodies, sizes, strict=True)]

    def broadcast_bytes(self, mine: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; returns when all ranks are there."""
        (nbytes,) = self.all_reduce_max([-1 if mine is None else len(mine)])
        number = self._next()
        body = torch.empty(nbytes, dtype=torch.uint8)
        if mine is not None:
            body = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._check_late(number, self._wait(self._gloo.broadcast(body, 0, _NEVER), number))
        return body.numpy().tobytes()

    def sign(self) -> None:
        """Tell the ranks that may wait for this one that its work goes on. Cheap: most calls do nothing."""
        if time.monotonic() - self._signed_at > max(_SIGN_S, self.world / _SIGNS_PER_S):
            self._signed_at = time.monotonic()
            self._try(lambda: self._board.count("signs"))

    def _next(self) -> int:
        if self.failed is not None:
            raise RankError(self.failed)
        self._collectives += 1
        return self._collectives

    def _wait(self, work: Any, number: int) -> float:
        """How long it took, in seconds."""
        started = time.monotonic()
        watch: Watch | None = None
        look = timedelta(seconds=LOOK_S)
        broken = False
        while True:
            try:
                work.wait(look)
            except RuntimeError as error:
                if work.is_completed():
                    if broken:
                        self._explain(number, error)
                    broken = True  # or it has ended well since: ask once more
                    continue
            else:
                return time.monotonic() - started
            if self.failed is not None:
                raise RankError(self.failed)
            watch = watch or Watch(self, number)
            watch.look()

    # -- failure ---------------------------------------------------------------------------

    def _check_late(self, number: int, late_s: float) -> None:
        """A collective has come to its end here. If that took long, others may have given it up: what counts is one.

        ``late_s`` is by clocks of several hosts. Where these are far apart, the board is asked without need, or a rank
        that was given up hears of it one verb later.
        """
        if late_s < RANK_TIMEOUT_S / 2:
            return
        if self.rank == 0:
            time.sleep(_STORE_WAKES_S)  # it may keep the job's store, which was stopped with it: notes come first
        found = self._try(lambda: self._board.decide(f"end/{number}", _PASSED))
        if found is not None and found != _PASSED:
            self._abide(found)

    def give_up(self, number: int, text: str, rank: int, *, surely: bool) -> bool:
        """End a collective by RankError, on all ranks. False when it has come to its end on one that was late."""
        verdict = msgspec.json.encode(Verdict(text, rank, number)).decode()
        found = self._try(lambda: self._board.decide(f"end/{number}", verdict))
        if found == _PASSED and not surely:
            return False
        counts = verdict if found is None or found == _PASSED else found
        self._try(lambda: self._board.write("failed", counts))
        return self._abide(counts)

    def _fail(self, number: int, text: str, rank: int) -> NoReturn:
        self.give_up(number, text, rank, surely=True)
        raise AssertionError

    def _abide(self, found: str) -> NoReturn:
        verdict = msgspec.json.decode(found, type=Verdict)
        given_up = "the other ranks have given this one up: " if verdict.rank == self.rank else ""
        self.failed = f"{given_up}{verdict.text}"
        raise RankError(self.failed)

    def read_verdict(self) -> None:
        """Raise what another rank has found, if any has."""
        found = self._try(lambda: self._board.read("failed"))
        if found:
            self._abide(found)

    def _explain(self, number: int, error: Exception) -> NoReturn:
        """Gloo says that a connection is broken: find out whose."""
        self.arrive(number)
        watch = Watch(self, number)
        for _ in range(4):  # a process that is being killed closes its sockets a moment before it is seen to be dead
            watch.look(only_dead=True)
            time.sleep(LOOK_S)
        self.read_verdict()
        absent = self.absent(number)
        named = 0 < len(absent) <= NAMED
        who = f"{self.name(absent)} did not come, and a connection is broken" if named else "a connection is broken"
        self._fail(number, f"{who}; {self.noticed()}: {error}", absent[0] if len(absent) == 1 else -1)

    def arrive(self, number: int) -> None:
        """Say that this rank waits in a collective."""
        self._try(lambda: self._board.write(f"came/{self.rank}", str(number)))

    def absent(self, number: int) -> list[int]:
        """The ranks that have not said so; [] when that cannot be told."""
        came = self._try(lambda: self._board.read_all([f"came/{rank}" for rank in range(self.world)]))
        return [rank for rank, found in enumerate(came or []) if found == "" or int(found) < number]

    def signs(self) -> int:
        """How many signs of progress there were, of any rank."""
        return int(self._try(lambda: self._board.read("signs")) or 0)

    def name(self, ranks: Sequence[int]) -> str:
        """Them, and for few of them also their processes."""
        if len(ranks) > NAMED or not self.peers:
            return name_ranks(ranks)
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def noticed(self) -> str:
        """Who says so, and in what."""
        return f"noticed by rank {self.rank} in {self.doing}"

    def _try(self, act: Callable[[], Any]) -> Any:
        """What the board says; None when it is out of reach."""
        try:
            return act()
        except BoardError:
            return None

    # -- meeting ---------------------------------------------------------------------------

    def _meet(self) -> None:
        """Return when all ranks have come, having looked after those that are known."""
        watch = Watch(self, 0)
        self.arrive(0)
        if self._try(lambda: self._board.count("here")) == self.world:
            self._check_met(self._try(lambda: self._board.decide("end/0", _PASSED)))
            return
        poll_s, last_s = _POLL_FIRST_S, max(_POLL_LAST_S, self.world / 1000)
        looked_at = time.monotonic()
        while not self._check_met(self._try(lambda: self._board.read("end/0"))):
            time.sleep(poll_s)
            poll_s = min(last_s, poll_s * 1.5)
            if time.monotonic() - looked_at > LOOK_S:
                looked_at = time.monotonic()
                watch.look()

    def _check_met(self, found: str | None) -> bool:
        if found and found != _PASSED:
            self._abide(found)
        return found == _PASSED


class Watch:
    """What a rank that waits in one collective looks at meanwhile, every ``LOOK_S``."""

    def __init__(self, group: Group, number: int) -> None:
        self._group, self._number = group, number
        self._sign_at = self._looked_at = time.monotonic()
        here = group.peers[group.rank].pids if group.peers else ""
        self._near = [
            rank for rank, peer in enumerate(group.peers) if here and peer.pids == here and rank != group.rank
        ]
        self._dead: set[int] = set()
        self._stopped: dict[int, float] = {}  # rank -> since when
        self._passed = False
        self._signs = -1
        # Not all ranks at once, and at many ranks seldom.
        self._board_s = max(2.0, group.world / _BOARD_PER_S)
        self._board_at = self._looked_at + self._board_s * (0.5 + group.rank / group.world / 2)
        self._arrived = False

    def look(self, *, only_dead: bool = False) -> None:
        """Raise RankError when a rank will not come any more."""
        now = time.monotonic()
        if now - self._looked_at > 4 * LOOK_S:  # this process itself was stopped, perhaps the others with it
            self._stopped.clear()
            self._sign_at = now
        self._looked_at = now
        for rank in self._near:
            self._look_at(rank, now)
        if only_dead:
            return
        if now >= self._board_at:
            self._board_at = now + self._board_s
            if not self._arrived:
                self._arrived = True
                self._group.arrive(self._number)
            self._group.read_verdict()
            if now - self._sign_at > SILENCE_TIMEOUT_S / 4:
                self._look_for_signs(now)

    def _look_at(self, rank: int, now: float) -> None:
        peer = self._group.peers[rank]
        found = condition(peer.pid, peer.start)
        if found == DEAD:
            if rank in self._dead:  # what it had sent before has come by now
                self._give_up([rank], "is dead", surely=True)
            self._dead.add(rank)
        elif found == STOPPED:
            since = self._stopped.setdefault(rank, now)
            if now - since >= RANK_TIMEOUT_S:
                self._give_up([rank], f"has been stopped for {RANK_TIMEOUT_S:g} s (SIGCONT lets it go on)")
        else:
            self._stopped.pop(rank, None)

    def _look_for_signs(self, now: float) -> None:
        signs = self._group.signs()
        if signs != self._signs and self._signs >= 0:
            self._sign_at = now
        self._signs = signs
        if now - self._sign_at > SILENCE_TIMEOUT_S:
            absent = self._group.absent(self._number)
            if absent:
                self._give_up(absent, f"did not come within {SILENCE_TIMEOUT_S:g} s, and no rank has made progress")
            else:
                self._give_up(
                    [],
                    f"nothing has moved for {SILENCE_TIMEOUT_S:g} s, though all ranks are there or none can be asked",
                )

    def _give_up(self, ranks: list[int], what: str, *, surely: bool = False) -> None:
        group = self._group
        text = f"{group.name(ranks)} {what}".lstrip() + f"; {group.noticed()}"
        if group.give_up(self._number, text, ranks[0] if len(ranks) == 1 else -1, surely=surely or self._passed):
            return
        self._passed = True  # it is on its way; but it may be stopped again
        self._stopped.clear()
        self._sign_at = time.monotonic()
