"""What a keeper has in hand: arenas, saves under way, and what became of those that ended. Main thread only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from ckpt.errors import BadInputError, CkptError, RankError
from ckpt.format.commit import Attempt
from ckpt.format.records import MAX_WORLD
from ckpt.keeper import log, protocol
from ckpt.keeper.arenas import FILLING, STAGED, Arena, ArenaPool, Wanted
from ckpt.keeper.lanes import Lane, Settled, Written
from ckpt.keeper.persist import attempt_of, check_task
from ckpt.keeper.saves import QUEUED, WRITING, Failure, Save, Work

STUCK_WRITE_S = 60.0  # how long, at most, a thread that still writes for a failed save is waited for
_REMEMBERED_SAVES = 256

Answer = Callable[[int, msgspec.Struct, int | None], None]  # connection, message, descriptor
SaveKey = tuple[str, Attempt]


class Death(msgspec.Struct, frozen=True):
    """A trainer that died. ``newest`` is the newest connection there was at that time.

    Only saves of peers that were connected then wait for the dead: after a restart the ranks of a
    node may be others.
    """

    pid: int
    newest: int


class Filling(msgspec.Struct, frozen=True):
    """An arena that a trainer copies into, although its save may have failed or, without ``save``, was refused."""

    arena: Arena
    end: int
    save: Save | None = None
    work: Work | None = None

    def lose(self, error: RankError) -> None:
        """What is in it will never be whole."""
        if self.save is not None and self.work is not None:
            self.save.lose(self.work.task.rank, error)


class Registry:
    """``answer`` sends to a connection (and forgets it when that is gone); ``post`` is called from other threads."""

    def __init__(self, answer: Answer, post: Callable[[Written | Settled], None]) -> None:
        self._answer = answer
        self._post = post
        self.pool = ArenaPool(self._grant, self._refuse, lambda run, rank: (run, rank) in self._users)
        self._lanes: dict[str, Lane] = {}
        self._users: dict[tuple[str, int], set[int]] = {}  # (run, rank) -> connections that save to it
        self._saves: dict[SaveKey, Save] = {}
        self._filling: dict[tuple[int, int], Filling] = {}  # (connection, request) -> until the trainer is done with it
        self._ended: OrderedDict[SaveKey, Failure | None] = OrderedDict()
        self._deaths: dict[int, Death] = {}  # by rank
        self._stuck: dict[int, float] = {}  # arena that a failed save still reads -> until when it is waited for

    # -- arenas ----------------------------------------------------------------------------

    def _grant(self, wanted: Wanted, arena: Arena) -> None:
        arenas = self.pool.numbers(arena.run, arena.rank)
        self._answer(wanted.holder, protocol.ArenaGrant(wanted.request, arena.number, arena.nbytes, arenas), arena.fd)

    def _refuse(self, wanted: Wanted, error: CkptError) -> None:
        log.problem(str(error))
        self._answer(wanted.holder, _failed(wanted.request, error), None)

    def request_arena(self, run: str, rank: int, wanted: Wanted) -> None:
        """A trainer wants to save to a run."""
        self._users.setdefault((run, rank), set()).add(wanted.holder)
        self.pool.request(run, rank, wanted)

    def release(self, holder: int, number: int) -> None:
        """A trainer gives an arena back. BadInputError for one that was not lent to it."""
        for key, filling in list(self._filling.items()):
            if key[0] == holder and filling.arena.number == number:
                filling.lose(RankError(f"rank {filling.arena.rank} gave its snapshot up before it was staged"))
                self._let_go(key)
                return
        self.pool.free(self.pool.granted(holder, number))

    def _let_go(self, key: tuple[int, int]) -> None:
        """The trainer is done with an arena; so is everyone when nothing reads it any more."""
        filling = self._filling.pop(key)
        if filling.work is None:
            filling.arena.filled = False
            self.pool.free(filling.arena)
            return
        filling.work.copied = True
        if filling.work.over:
            self.pool.free(filling.arena)

    # -- saves -----------------------------------------------------------------------------

    def begin(
        self, holder: int, request: int, task: protocol.SaveTask, neighbours: Iterable[int], trainer_pid: int = 0
    ) -> None:
        """Write a rank's snapshot while it is copied; ``neighbours`` are the ranks that are connected."""
        key = (task.run, attempt_of(task))
        try:
            arena = self.pool.granted(holder, task.arena)
        except BadInputError as error:
            self._give_up(task.rank, key, task.world, error, neighbours)
            self._answer(holder, _failed(request, error), None)
            return
        try:
            check_task(task, arena.nbytes)
            if (arena.run, arena.rank) != (task.run, task.rank):
                raise BadInputError(f"arena {task.arena} is of rank {arena.rank} of {arena.run}, the task of another")
            if key in self._saves and task.rank in self._saves[key].works:
                raise BadInputError(f"rank {task.rank} has already begun step {task.step} ({key[1].label})")
            if key in self._ended:
                raise self._too_late(key, task.rank)
        except CkptError as error:
            arena.state, arena.filled = FILLING, True
            self._filling[holder, request] = Filling(arena, protocol.arena_end(task))
            if key not in self._saves or task.rank not in self._saves[key].works:
                self._give_up(task.rank, key, task.world, error, neighbours)
            self._answer(holder, _failed(request, error), None)
            return
        arena.state, arena.filled = FILLING, True
        work = Work(task, arena, holder, request, trainer_pid)
        save = self._save(key, task.world, task.progress_timeout_s, neighbours)
        save.add(task.rank, work)
        self._filling[holder, request] = Filling(arena, work.end, save, work)
        self._lane(task.run).write(save, work)
        for rank, death in self._deaths.items():
            self._lose_if_dead(save, rank, death)

    def ready(self, holder: int, request: int, nbytes: int) -> None:
        """So much of an arena is final; at the end the snapshot is staged, unless its save has failed meanwhile."""
        key = (holder, request)
        filling = self._filling.get(key)
        if filling is None:
            return  # its arena was not lent to this client
        save, work = filling.save, filling.work
        if save is not None and work is not None and save.failure is None:
            said = max(0, work.ready)
            if said <= nbytes <= work.end:
                if nbytes == work.end:
                    work.arena.state = STAGED
                    work.copied = True
                    self._answer(holder, protocol.Staged(request), None)
                save.advance(work, nbytes)
            else:
                rank = work.task.rank
                save.fail(
                    BadInputError(
                        f"rank {rank} says that {nbytes:,} bytes of its arena are final, "
                        f"expected {said:,}, which it has said already, to {work.end:,}"
                    ),
                    rank,
                )
        if nbytes >= filling.end:
            self._let_go(key)

    def abandon(self, message: protocol.Abandon, neighbours: Iterable[int]) -> None:
        """A trainer says that its part will never come."""
        key = (message.run, Attempt(message.step, message.writer, message.save))
        error = RankError(f"rank {message.rank}: {message.message}")
        error.exit_code = message.exit_code
        self._give_up(message.rank, key, message.world, error, neighbours)

    def _give_up(self, rank: int, key: SaveKey, world: int, error: CkptError, neighbours: Iterable[int]) -> None:
        if key not in self._ended and 0 <= rank < world <= MAX_WORLD:
            self._save(key, world, 0.0, neighbours).lose(rank, error)

    def _too_late(self, key: SaveKey, rank: int) -> CkptError:
        failure = self._ended[key]
        if failure is None:
            return BadInputError(f"step {key[1].step} ({key[1].label}) is committed already")
        return failure.error_for(rank, key[1])

    def _save(self, key: SaveKey, world: int, progress_timeout_s: float, neighbours: Iterable[int]) -> Save:
        save = self._saves.get(key)
        if save is None:
            save = self._saves[key] = Save(*key, world, progress_timeout_s)
            self._lane(key[0]).begin(save)
        save.neighbours.update(neighbours)
        return save

    def _lane(self, run: str) -> Lane:
        if run not in self._lanes:
            self._lanes[run] = Lane(run, self._post)
        return self._lanes[run]

    # -- what the lanes report -------------------------------------------------------------

    def written(self, event: Written) -> None:
        """A rank's files and part are durable, or have failed: its arena is free again, unless it is still filled."""
        self._stuck.pop(event.work.arena.number, None)
        event.work.over = True
        event.work.arena.filled = event.save.failure is None  # else the other arena has the newest whole snapshot
        if event.work.copied:
            self.pool.free(event.work.arena)

    def settled(self, event: Settled) -> None:
        """A save is over: tell its ranks."""
        save, now = event.save, time.monotonic()
        key = (save.run, save.attempt)
        del self._saves[key]
        self._ended[key] = save.failure
        while len(self._ended) > _REMEMBERED_SAVES:
            self._ended.popitem(last=False)
        outcome = "committed" if save.failure is None else f"failed: {save.failure.kind}: {save.failure.message}"
        (log.say if save.failure is None else log.problem)(f"{save.run}: {save.attempt.folder}: {outcome}")
        for rank, work in save.works.items():
            if work.state in {QUEUED, WRITING}:
                self._stuck[work.arena.number] = now + min(STUCK_WRITE_S, save.progress_timeout_s)
                self.pool.stick(work.arena)
            if save.failure is not None:
                error = save.failure.error_for(rank, save.attempt)
                self._answer(work.holder, _failed(work.request, error, at_fault=rank == save.failure.rank), None)
                continue
            result = protocol.SaveResult(
                step=save.attempt.step,
                attempt=save.attempt.label,
                nbytes_written=save.seen[rank].nbytes,
                write_s=work.write_s,
                commit_s=event.at - work.staged_at,
                warnings=event.warnings,
                alarms=save.alarms,
            )
            self._answer(work.holder, protocol.Saved(work.request, result), None)
        self._stop_if_idle(save.run)

    # -- trainers that come and die --------------------------------------------------------

    def rank_came(self, rank: int) -> None:
        """A trainer has connected."""
        self._deaths.pop(rank, None)

    def connection_left(self, number: int, how: str, *, done: bool) -> None:
        """A connection has ended, ``how`` being ``process 123) died``: what it was copying will never be whole.

        If its rank is done, memory and threads for runs that nobody else saves to go.
        """
        for key, filling in list(self._filling.items()):
            if key[0] == number:
                filling.lose(RankError(f"rank {filling.arena.rank} ({how} before its snapshot was staged"))
                self._let_go(key)
        self.pool.drop_holder(number)
        for (run, rank), users in list(self._users.items()):
            users.discard(number)
            if not users:
                del self._users[run, rank]
                if done:
                    self.pool.retire(run, rank)
                self._stop_if_idle(run)

    def _stop_if_idle(self, run: str) -> None:
        used = any(user == run for user, _ in self._users) or any(saved == run for saved, _ in self._saves)
        if not used and run in self._lanes and not self._stuck:
            self._lanes.pop(run).stop()

    def rank_died(self, rank: int, pid: int, newest_connection: int) -> None:
        """A trainer's process has ended without bye: saves that it has not begun fail."""
        death = self._deaths[rank] = Death(pid, newest_connection)
        for save in self._saves.values():
            self._lose_if_dead(save, rank, death)

    def _lose_if_dead(self, save: Save, rank: int, death: Death) -> None:
        peers = [work.holder for work in save.works.values()]
        if rank < save.world and rank not in save.works and any(peer <= death.newest for peer in peers):
            save.lose(rank, RankError(f"rank {rank} (process {death.pid}) died before its snapshot was staged"))

    # -- questions -------------------------------------------------------------------------

    def busy_until(self) -> float | None:
        """None: nothing is under way. Else the time until which it is waited for, for ever if infinite."""
        if self._saves:
            return float("inf")
        return max(self._stuck.values(), default=None)

    def saves(self) -> tuple[protocol.SaveStatus, ...]:
        """What is under way, for people."""
        return tuple(save.status() for save in self._saves.values())


def _failed(request: int, error: CkptError, *, at_fault: bool = True) -> protocol.Failed:
    return protocol.Failed(request, type(error).__name__, str(error), error.exit_code, at_fault=at_fault)
