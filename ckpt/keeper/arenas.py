"""The keeper's arenas: sealed memfds, two per rank and run, each lent to one snapshot at a time."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ckpt.errors import BadInputError, CkptError, KeeperError, SaveFailedError
from ckpt.keeper.protocol import ArenaStatus

ARENAS_PER_RANK = 2  # one snapshot is always whole while the next one is made
_ALIGN_NBYTES = 2 << 20  # huge pages

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
        self.used = 0  # a counter: the arena that was used longest ago is lent next
        self.nbytes = 0
        self.fd = -1
        self._map: mmap.mmap | None = None

    def grow(self, nbytes: int) -> None:
        """Have at least ``nbytes``. KeeperError when the node has not so much memory."""
        nbytes = max(1, -(-nbytes // _ALIGN_NBYTES)) * _ALIGN_NBYTES
        if nbytes <= self.nbytes:
            return
        available = _available_nbytes()
        if available is not None and nbytes - self.nbytes > available:
            raise KeeperError(
                f"no memory for the snapshot of rank {self.rank}: it needs {nbytes - self.nbytes:,} bytes more, "
                f"{available:,} are available on this node; save less, or give the job more host memory"
            )
        try:
            if self.fd < 0:
                self.fd = os.memfd_create(f"ckpt-rank-{self.rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            if not self.nbytes:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, nbytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise KeeperError(f"no arena of {nbytes:,} bytes for rank {self.rank}: {error.strerror}") from error
        self.nbytes = nbytes

    @property
    def view(self) -> memoryview:
        """Its bytes, read-only."""
        assert self._map is not None
        return memoryview(self._map)

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


class ArenaPool:
    """All arenas of a keeper, and who waits for one. Used by the keeper's main thread only.

    ``grant(wanted, arena)`` and ``refuse(wanted, error)`` answer requests, at once or later.
    """

    def __init__(self, grant: Callable[[Wanted, Arena], None], refuse: Callable[[Wanted, CkptError], None]) -> None:
        self._grant = grant
        self._refuse = refuse
        self._arenas: dict[int, Arena] = {}
        self._waiting: dict[tuple[str, int], deque[Wanted]] = {}
        self._numbers = 0
        self._uses = 0

    def request(self, run: str, rank: int, wanted: Wanted) -> None:
        """Ask for an arena of a rank and run."""
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
            del self._arenas[arena.number]
            arena.close()
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
                del self._arenas[arena.number]
                arena.close()

    def status(self) -> tuple[ArenaStatus, ...]:
        """Every arena, for people."""
        return tuple(ArenaStatus(a.number, a.run, a.rank, a.nbytes, a.state) for a in self._arenas.values())

    def _serve(self, run: str, rank: int) -> None:
        queue = self._waiting.get((run, rank), deque())
        while queue:
            arena = self._next(run, rank)
            if arena is None and not self._all_stuck(run, rank):
                return
            wanted = queue.popleft()
            if arena is None:
                text = f"no arena for rank {rank}: writes of failed saves to {run} do not return; see to the store"
                self._refuse(wanted, SaveFailedError(text))
                continue
            try:
                arena.grow(wanted.nbytes)
            except CkptError as error:
                if not arena.nbytes:
                    del self._arenas[arena.number]
                    arena.close()
                self._refuse(wanted, error)
                continue
            self._uses += 1
            arena.state, arena.holder, arena.used = GRANTED, wanted.holder, self._uses
            self._grant(wanted, arena)
        self._waiting.pop((run, rank), None)

    def _own(self, run: str, rank: int) -> list[Arena]:
        return [arena for arena in self._arenas.values() if (arena.run, arena.rank) == (run, rank)]

    def _all_stuck(self, run: str, rank: int) -> bool:
        return all(arena.state == STUCK for arena in self._own(run, rank))

    def _next(self, run: str, rank: int) -> Arena | None:
        own = self._own(run, rank)
        if len(own) < ARENAS_PER_RANK:
            self._numbers += 1
            arena = self._arenas[self._numbers] = Arena(self._numbers, run, rank)
            return arena
        return min((arena for arena in own if arena.state == FREE), key=lambda arena: arena.used, default=None)


def _available_nbytes() -> int | None:
    """What the kernel thinks can be had without swapping; None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_bytes().splitlines():
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
