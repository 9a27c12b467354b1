"""The keeper's arenas: sealed memfds, at most two per rank and run, each lent to one snapshot at a time."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from ckpt.errors import BadInputError, CkptError, KeeperError, SaveFailedError
from ckpt.format.records import MAX_INT
from ckpt.keeper.mapping import Mapping
from ckpt.keeper.memory import arena_nbytes, check_budget
from ckpt.keeper.protocol import ArenaStatus, RunStatus

ARENAS_PER_RANK = 2  # one snapshot is always whole while the next one is made; less only on request
_BLOCK_NBYTES = 512  # of st_blocks

FREE, GRANTED, FILLING, STAGED, STUCK = "free", "granted", "filling", "staged", "stuck"


class Arena:
    """One memfd. It may grow while it is free and never shrinks, so a trainer's mapping of it stays good."""

    def __init__(self, number: int, run: str, rank: int) -> None:
        self.number = number
        self.run = run
        self.rank = rank
        self.state = FREE
        self.holder = 0  # the connection it is lent to
        self.retired = False  # close it as soon as it is free
        self.filled = False  # whether it has held a snapshot, and may hold the newest whole one
        self.used = 0  # a counter: the arena that was used longest ago is lent next
        self.nbytes = 0
        self.fd = -1
        self._map: Mapping | None = None

    def grow(self, nbytes: int) -> None:
        """Have at least ``nbytes``, for which there must be memory. KeeperError when the kernel refuses it."""
        nbytes = arena_nbytes(nbytes)
        if nbytes <= self.nbytes:
            return
        try:
            if self.fd < 0:
                self.fd = os.memfd_create(f"ckpt-rank-{self.rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            if not self.nbytes:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._map = Mapping(self.fd, nbytes, writable=False)
        except OSError as error:
            raise KeeperError(f"no arena of {nbytes:,} bytes for rank {self.rank}: {error.strerror}") from error
        self.nbytes = nbytes

    @property
    def view(self) -> memoryview:
        """Its bytes, read-only."""
        assert self._map is not None
        return self._map.view

    @property
    def untouched_nbytes(self) -> int:
        """What of it is not in memory yet, but may come at any moment without another word."""
        if self.fd < 0:
            return 0
        return max(0, self.nbytes - os.fstat(self.fd).st_blocks * _BLOCK_NBYTES)

    def close(self) -> None:
        """Give the memory back (what the trainer has mapped stays until it unmaps it)."""
        self._map = None  # unmapped when the last view is gone
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Wanted(msgspec.Struct, frozen=True):
    """A request for an arena that has not been answered yet."""

    holder: int
    request: int
    nbytes: int
    snapshots: int = ARENAS_PER_RANK  # how many arenas its rank may have
    budget_bytes: int | None = None  # what all arenas of its run may take together


class ArenaPool:
    """All arenas of a keeper, and who waits for one. Used by the keeper's main thread only.

    ``grant(wanted, arena)`` and ``refuse(wanted, error)`` answer requests, at once or later; ``in_use(run, rank)``
    tells whether someone who is connected has asked for arenas of that rank and run. ``proc``: see ``check_budget``.
    """

    def __init__(
        self,
        grant: Callable[[Wanted, Arena], None],
        refuse: Callable[[Wanted, CkptError], None],
        in_use: Callable[[str, int], bool] = lambda _run, _rank: True,
        proc: str = "/proc",
    ) -> None:
        self._grant = grant
        self._refuse = refuse
        self._in_use = in_use
        self._proc = proc
        self._arenas: dict[int, Arena] = {}
        self._waiting: dict[tuple[str, int], deque[Wanted]] = {}
        self._newest: dict[str, Wanted] = {}  # run -> the request that says how many arenas, and how large a budget
        self._numbers = 0
        self._uses = 0

    def request(self, run: str, rank: int, wanted: Wanted) -> None:
        """Ask for an arena of a rank and run."""
        if not 1 <= wanted.snapshots <= ARENAS_PER_RANK:
            text = f"snapshots={wanted.snapshots}: a rank has 1 or {ARENAS_PER_RANK} arenas of a run"
            self._refuse(wanted, BadInputError(text))
            return
        if not 0 <= wanted.nbytes <= MAX_INT:
            self._refuse(wanted, BadInputError(f"an arena of {wanted.nbytes} bytes; expected 0 to {MAX_INT}"))
            return
        self._newest[run] = wanted
        for arena in self._own(run, rank):
            arena.retired = False
        self._waiting.setdefault((run, rank), deque()).append(wanted)
        self._serve(run, rank)

    def granted(self, holder: int, number: int) -> Arena:
        """The arena that ``holder`` fills. BadInputError for one that was not lent to it."""
        arena = self._arenas.get(number)
        if arena is None or arena.state != GRANTED or arena.holder != holder:
            raise BadInputError(f"arena {number} is not lent to this process")
        return arena

    def free(self, arena: Arena) -> None:
        """The snapshot in it is durable, or given up: lend it to the next."""
        arena.state, arena.holder = FREE, 0
        if arena.retired:
            self._close(arena)
        self._serve(arena.run, arena.rank)

    def retire(self, run: str, rank: int) -> None:
        """Nobody will ask for this rank's arenas of the run again soon: give their memory back when they are free."""
        for arena in self._own(run, rank):
            arena.retired = True
            if arena.state == FREE:
                self.free(arena)

    def stick(self, arena: Arena) -> None:
        """A failed save still reads from it, in a write that does not return; ``free`` when it does."""
        arena.state = STUCK
        self._serve(arena.run, arena.rank)

    def drop_holder(self, holder: int) -> None:
        """A connection has ended: what it had not begun to fill yet is nobody's."""
        for key, queue in list(self._waiting.items()):
            self._waiting[key] = deque(wanted for wanted in queue if wanted.holder != holder)
        for arena in list(self._arenas.values()):
            if arena.state == GRANTED and arena.holder == holder:
                self.free(arena)

    def drop_ranks(self, ranks: Iterable[int]) -> None:
        """Give back the free arenas of ranks that do not come back."""
        gone = set(ranks)
        for arena in list(self._arenas.values()):
            if arena.rank in gone and arena.state == FREE:
                self._close(arena)

    def numbers(self, run: str, rank: int) -> tuple[int, ...]:
        """Those that a rank has of a run."""
        return tuple(arena.number for arena in self._own(run, rank))

    def status(self) -> tuple[ArenaStatus, ...]:
        """Every arena, for people."""
        return tuple(ArenaStatus(a.number, a.run, a.rank, a.nbytes, a.state) for a in self._arenas.values())

    def runs(self) -> tuple[RunStatus, ...]:
        """Every run that has arenas, for people."""
        return tuple(
            RunStatus(run, self._run_nbytes(run), wanted.snapshots, wanted.budget_bytes)
            for run, wanted in self._newest.items()
        )

    @property
    def untouched_nbytes(self) -> int:
        """Of all arenas together."""
        return sum(arena.untouched_nbytes for arena in self._arenas.values())

    def _serve(self, run: str, rank: int) -> None:
        self._trim(run, rank)
        queue = self._waiting.get((run, rank), deque())
        while queue:
            arena = self._next(run, rank, queue[0].snapshots)
            if arena is None and not self._all_stuck(run, rank):
                return
            wanted = queue.popleft()
            if arena is None:
                text = f"no arena for rank {rank}: writes of failed saves to {run} do not return; see to the store"
                self._refuse(wanted, SaveFailedError(text))
                continue
            try:
                try:
                    self._check_memory(arena, wanted)
                except KeeperError:
                    if not self._reclaim():
                        raise
                    self._check_memory(arena, wanted)
                arena.grow(wanted.nbytes)
            except CkptError as error:
                if not arena.nbytes:
                    self._close(arena)
                self._refuse(wanted, error)
                continue
            self._uses += 1
            arena.state, arena.holder, arena.used = GRANTED, wanted.holder, self._uses
            self._grant(wanted, arena)
        self._waiting.pop((run, rank), None)

    def _check_memory(self, arena: Arena, wanted: Wanted) -> None:
        """KeeperError when the arena cannot become as large as it is wanted."""
        growth = max(0, arena_nbytes(wanted.nbytes) - arena.nbytes)
        held = self._run_nbytes(arena.run)
        check_budget(
            held + growth,
            wanted.budget_bytes,
            f"the snapshot of rank {arena.rank}",
            snapshots=wanted.snapshots,
            held_nbytes=held,
            promised_nbytes=self.untouched_nbytes,
            proc=self._proc,
        )

    def _reclaim(self) -> bool:
        """Close free arenas that nobody who is connected has asked for: a job may restart with other ranks."""
        idle = [a for a in self._arenas.values() if a.state == FREE and a.nbytes and not self._in_use(a.run, a.rank)]
        for arena in idle:
            self._close(arena)
        return bool(idle)

    def _trim(self, run: str, rank: int) -> None:
        """Close free arenas that are too many since the newest request. Stuck ones serve nobody and do not count."""
        newest = self._newest.get(run)
        lent = [arena for arena in self._own(run, rank) if arena.state != STUCK]
        while newest is not None and len(lent) > newest.snapshots:
            oldest = min((a for a in lent if a.state == FREE), key=lambda arena: arena.used, default=None)
            if oldest is None:
                return
            lent.remove(oldest)
            self._close(oldest)

    def _close(self, arena: Arena) -> None:
        del self._arenas[arena.number]
        arena.close()
        if all(other.run != arena.run for other in self._arenas.values()):
            self._newest.pop(arena.run, None)

    def _run_nbytes(self, run: str) -> int:
        return sum(arena.nbytes for arena in self._arenas.values() if arena.run == run)

    def _own(self, run: str, rank: int) -> list[Arena]:
        return [arena for arena in self._arenas.values() if (arena.run, arena.rank) == (run, rank)]

    def _all_stuck(self, run: str, rank: int) -> bool:
        return all(arena.state == STUCK for arena in self._own(run, rank))

    def _next(self, run: str, rank: int, snapshots: int) -> Arena | None:
        own = self._own(run, rank)
        free = [arena for arena in own if arena.state == FREE]
        empty = [arena for arena in free if not arena.filled]  # touched by its rank, maybe, and nothing more
        if not empty and len(own) < snapshots:
            self._numbers += 1
            arena = self._arenas[self._numbers] = Arena(self._numbers, run, rank)
            return arena
        return min(empty or free, key=lambda arena: arena.used, default=None)
