"""What a keeper knows of a save under way: which ranks have begun, staged, written, failed or died."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import msgspec

from ckpt.errors import CkptError, RankError, error_from_kind
from ckpt.format.alarms import Alarm
from ckpt.format.commit import Attempt, FileRef
from ckpt.format.part import Part
from ckpt.keeper.alarms import Sum
from ckpt.keeper.arenas import Arena
from ckpt.keeper.parity import Stored
from ckpt.keeper.protocol import RankStatus, SaveStatus, SaveTask, arena_end

QUEUED, WRITING, DURABLE, FAILED = "queued", "writing", "durable", "failed"
_REST_S = 0.1  # how often a thread that rests says that it has not been forgotten


class SeenPart(msgspec.Struct, frozen=True):
    """What COMMIT needs of one rank's durable part."""

    rank: int
    ref: FileRef
    layout: str
    values_digests: dict[str, str]
    encoded: bool  # has a pack
    nbytes: int  # of its data files and itself, as stored
    has_alarms: bool = False
    alarms: tuple[Alarm, ...] = ()  # until they are added to those of the other ranks


def see(part: Part, ref: FileRef) -> SeenPart:
    """The gist of a part, so that thousands of parts need not be kept."""
    encoded = any(file.encoding != "raw" for file in part.files)
    nbytes = ref.nbytes + sum(file.nbytes for file in part.files)
    return SeenPart(part.rank, ref, part.layout, part.values_digests, encoded, nbytes, bool(part.alarms), part.alarms)


class Work:
    """One rank's task in this keeper. The rank's writing thread and the main thread change it; others look."""

    def __init__(self, task: SaveTask, arena: Arena, holder: int, request: int, trainer_pid: int = 0) -> None:
        self.task = task
        self.arena = arena
        self.trainer_pid = trainer_pid
        self.holder = holder  # the connection to answer to
        self.request = request
        self.state = QUEUED
        self.nbytes = sum(file.nbytes for file in task.files)
        self.end = arena_end(task)
        self.ready = -1  # so much of the arena is final; -1: not a word yet, which differs from 0 when ``end`` is 0
        self.copied = False  # whether the trainer is done with the arena
        self.over = False  # whether the keeper is
        self.nbytes_written = 0
        self.write_s = 0.0
        self.staged_at = time.monotonic()  # begun, until it is staged
        self.keys: list[str] = []  # what it has created in the store, and may remove again
        self.thread: threading.Thread | None = None  # that writes it


class Failure(msgspec.Struct, frozen=True):
    """Why a save fails, and of which rank it is the fault (None: of all, or of nobody in particular)."""

    kind: str
    message: str
    rank: int | None
    exit_code: int = 0  # of the cause, where it is another than that of ``kind``

    def error_for(self, rank: int, attempt: Attempt) -> CkptError:
        """The error that ``rank`` is told: its own as it was, another rank's as a RankError that names it.

        Either has the cause's exit code: on every rank the job ends with the same one.
        """
        text = f"save of step {attempt.step} ({attempt.label}) failed: "
        error = error_from_kind(self.kind, text + self.message)
        exit_code = self.exit_code or error.exit_code
        if self.rank is not None and self.rank != rank and self.kind != RankError.__name__:
            error = RankError(f"{text}rank {self.rank}: {self.kind}: {self.message}")
        if error.exit_code != exit_code:
            error.exit_code = exit_code
        return error


class Debris(msgspec.Struct, frozen=True):
    """What a failed save has left, as far as this node knows."""

    attempt: Attempt
    keys: tuple[str, ...]
    alone: bool  # whether no other node has a part in it: then the folder goes too


class Save:
    """One attempt in this keeper. All fields are guarded by ``changed``, which is notified when something happens."""

    def __init__(self, run: str, attempt: Attempt, world: int, progress_timeout_s: float) -> None:
        self.run = run
        self.attempt = attempt
        self.world = world
        self.progress_timeout_s = progress_timeout_s
        self.changed = threading.Condition()
        self.changes = 0
        self.works: dict[int, Work] = {}
        self.seen: dict[int, SeenPart] = {}
        self.stored: dict[int, Stored] = {}  # ranks whose data files are on storage, while their parity is not
        self.parities: dict[int, FileRef] = {}  # lowest rank -> the record of the parity written here
        self.lost: set[int] = set()  # ranks of this node whose part will never come
        self.neighbours: set[int] = set()  # ranks whose trainers are connected to this keeper
        self.failure: Failure | None = None
        self.sum = Sum()  # of the alarms in ``seen``
        self.alarms: tuple[Alarm, ...] = ()  # of the step, once it exists
        self.committed = False  # whether COMMIT is durable
        self.debris: Debris | None = None  # what could not be removed when it had failed
        self.progress_at = time.monotonic()

    def add(self, rank: int, work: Work) -> None:
        """Rank ``rank`` has begun to fill its arena."""
        with self.changed:
            self.works[rank] = work
            self._progress()

    def wrote(self, work: Work, nbytes: int) -> None:
        """``nbytes`` more of a work are written. Raises SaveAbandoned when the save has failed meanwhile."""
        with self.changed:
            work.nbytes_written += nbytes
            self.progress_at = time.monotonic()
            if self.failure is not None:
                raise SaveAbandonedError

    def advance(self, work: Work, nbytes: int) -> None:
        """The first ``nbytes`` of a work's arena are final."""
        with self.changed:
            work.ready = nbytes
            if nbytes == work.end:
                work.staged_at = time.monotonic()
            self.progress_at = time.monotonic()
            self.changed.notify_all()  # the writing thread waits for it; nobody else counts it as news

    def await_ready(self, work: Work, nbytes: int) -> None:
        """Wait until the first ``nbytes`` of a work's arena are final. Raises SaveAbandoned when it has failed."""
        with self.changed:
            self.changed.wait_for(lambda: work.ready >= nbytes or self.failure is not None)
            if self.failure is not None:
                raise SaveAbandonedError

    def rest(self, seconds: float) -> None:
        """Wait so long on purpose, which is no standstill. Raises SaveAbandoned when the save has failed meanwhile."""
        until = time.monotonic() + seconds
        with self.changed:
            while self.failure is None and (left_s := until - time.monotonic()) > 0:
                self.progress_at = time.monotonic()
                self.changed.wait(min(left_s, _REST_S))
            self.progress_at = time.monotonic()
            if self.failure is not None:
                raise SaveAbandonedError

    def join(self, stored: Stored, ranks: Sequence[int]) -> list[Stored] | None:
        """A rank's data files are on storage: all that ``ranks`` have, for the last of them; the others wait for it.

        Raises SaveAbandoned when the save has failed meanwhile.
        """
        with self.changed:
            self.stored[stored.task.rank] = stored
            self._progress()
            if all(rank in self.stored for rank in ranks):
                return [self.stored.pop(rank) for rank in ranks]
            self.changed.wait_for(lambda: min(ranks) in self.parities or self.failure is not None)
            if self.failure is not None:
                self.stored.pop(stored.task.rank, None)  # and with it a view of the arena
                raise SaveAbandonedError
            return None

    def has_parity(self, lowest: int, ref: FileRef) -> None:
        """The parity of the ranks from ``lowest`` on is durable."""
        with self.changed:
            self.parities[lowest] = ref
            self._progress()

    def saw(self, part: SeenPart) -> None:
        """A part is durable."""
        with self.changed:
            if part.rank not in self.seen:
                self.sum.add(part.rank, part.alarms)
            self.seen[part.rank] = msgspec.structs.replace(part, alarms=())
            self._progress()

    def stirred(self) -> None:
        """Another node has made progress."""
        with self.changed:
            self._progress()

    def lose(self, rank: int, error: CkptError) -> None:
        """Rank ``rank``'s part will never come."""
        with self.changed:
            self.lost.add(rank)
        self.fail(error, rank)

    def fail(self, error: CkptError, rank: int | None) -> None:
        """The save cannot become a step; the first failure is the one that is told."""
        with self.changed:
            if self.failure is None:
                self.failure = Failure(type(error).__name__, str(error), rank, error.exit_code)
            self._progress()

    def go_on(self) -> None:
        """Raises SaveAbandoned when the save has failed: asked before what cannot be taken back."""
        with self.changed:
            if self.failure is not None:
                raise SaveAbandonedError

    def has_commit(self) -> None:
        """COMMIT is durable: whatever happens now, the step exists."""
        with self.changed:
            self.committed = True
            self._progress()

    def set_state(self, work: Work, state: str) -> None:
        """A work goes on to its next state."""
        with self.changed:
            work.state = state
            self._progress()

    def wait(self, changes: int, timeout_s: float) -> int:
        """Wait until more than ``changes`` things have happened, or the time is over; how many have."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes > changes, timeout_s)
            return self.changes

    def _progress(self) -> None:
        self.progress_at = time.monotonic()
        self.changes += 1
        self.changed.notify_all()

    # -- questions; the caller holds ``changed`` or does not mind an answer that is a moment old --------

    @property
    def coordinating(self) -> bool:
        """Whether this keeper writes COMMIT."""
        return 0 in self.works

    @property
    def missing(self) -> list[int]:
        """Ranks without a durable part, as far as this keeper knows."""
        return [rank for rank in range(self.world) if rank not in self.seen]

    @property
    def under_way(self) -> bool:
        """Whether a part is still being written here."""
        return any(work.state in {QUEUED, WRITING} for work in list(self.works.values()))

    def covers_world(self, *more: Iterable[int]) -> bool:
        """Whether the ranks that save or were lost here, and ``more``, are all there are: no other node has any."""
        return len({*self.works, *self.lost}.union(*more).intersection(range(self.world))) == self.world

    def status(self) -> SaveStatus:
        """What there is to say about it."""
        with self.changed:
            ranks = tuple(
                RankStatus(rank, work.state, work.nbytes_written, work.nbytes)
                for rank, work in sorted(self.works.items())
            )
            return SaveStatus(
                run=self.run,
                step=self.attempt.step,
                attempt=self.attempt.label,
                world=self.world,
                ranks=ranks,
                missing=tuple(self.missing),
                failure="" if self.failure is None else self.failure.message,
            )


class SaveAbandonedError(Exception):
    """Inside the keeper: stop writing, the save has failed for another reason."""


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``: however many, in one short text."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = ", ".join(words[:12]) + (f" and {len(words) - 12} more" if len(words) > 12 else "")
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if one else 's'} {shown}"
