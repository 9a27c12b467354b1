"""From parts to a step: wait until every rank of a save is durable, then commit it, or see it committed.

The store alone is the truth. What this node's ranks do is known at once; what other nodes do is
seen by looking into the attempt's folder: their parts, the marker that says that one has failed,
and COMMIT.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence

import msgspec

from ckpt.errors import AlreadyExistsError, CkptError, KeeperError, NotFoundError, SaveFailedError, error_from_kind
from ckpt.format import records
from ckpt.format.commit import COMMIT, Commit
from ckpt.format.part import part_name
from ckpt.keeper import alarms, commit, log, persist
from ckpt.keeper.requests import Request, Requests
from ckpt.keeper.saves import Debris, Failure, Save, SaveAbandonedError, SeenPart, Work, name_ranks
from ckpt.processes import ALIVE, condition
from ckpt.reading.alarms import step_alarms
from ckpt.run import Run

POLL_FIRST_S = 0.05
POLL_LAST_S = 0.5
_POLL_GROWTH = 1.3
_MARKER_LIMIT_NBYTES = 1 << 20
_STOP_WRITING_S = (1.0, 5.0)  # least and most that a failed save waits for its own writing to stop

_MARKER = re.compile(r"failed-\d{5,}-of-\d{5,}\.json")


class Marker(msgspec.Struct, frozen=True):
    """``failed-00003-of-00008.json``: tells the other nodes that this save will not become a step."""

    kind: str
    message: str
    rank: int | None
    exit_code: int = 0


def marker_name(rank: int, world: int) -> str:
    """The marker's name for the failure of ``rank``."""
    return f"failed-{rank:05d}-of-{world:05d}.json"


def settle(run: Run, save: Save, requests: Requests) -> list[str]:
    """Wait until the save is a step; returns warnings. Raises CkptError when it is none, after cleaning up.

    ``requests`` are those of the threads that write to ``run``, which a message may have to name.
    """
    settling = _Settling(run, save, requests)
    try:
        return settling.run_to_the_end()
    except SaveAbandonedError:
        settling.clean_up()
        settling._raise_failure()  # noqa: SLF001 - this module's own
        raise
    except CkptError as error:
        save.fail(error, None)
        settling.clean_up()
        raise
    except BaseException as error:
        save.fail(KeeperError(f"unexpected {type(error).__name__} in the keeper: {error}"), None)
        settling.clean_up()
        raise


class _Settling:
    """One save being settled, in its run's own thread."""

    def __init__(self, run: Run, save: Save, requests: Requests) -> None:
        self.run = run
        self.save = save
        self.requests = requests
        self.names: set[str] = set()  # of the attempt's folder, as listed last
        self.sizes: dict[str, int] = {}
        self.sized_at = time.monotonic()
        self.written: list[str] = []  # by the coordinator, beside the ranks' own files
        save.stirred()  # the time it spent waiting for older saves is not its fault

    def run_to_the_end(self) -> list[str]:
        poll_s, changes = POLL_FIRST_S, 0
        while True:
            self._raise_failure()
            with self.save.changed:
                coordinating, missing = self.save.coordinating, self.save.missing
                alone = self.save.covers_world()
                waiting_here = self.save.under_way
            if coordinating and not missing:
                return self._commit()
            if not alone:
                if not (coordinating or waiting_here) and self._is_committed():
                    return []
                if self._look():
                    poll_s = POLL_FIRST_S
                    continue
            self._check_progress()
            changed = self.save.wait(changes, POLL_LAST_S if alone else poll_s)
            poll_s = POLL_FIRST_S if changed > changes else min(POLL_LAST_S, poll_s * _POLL_GROWTH)
            changes = changed

    def _raise_failure(self) -> None:
        failure = self.save.failure
        if failure is not None:
            raise error_from_kind(failure.kind, failure.message)

    def _commit(self) -> list[str]:
        save = self.save
        parts = [save.seen[rank] for rank in range(save.world)]
        task = save.works[0].task
        commit.check_agreement(parts, task.layouts)
        found = save.sum.total(task.layouts)
        if task.alarms_fail:
            alarms.refuse(found)
        commit.create_commit(self.run, task, parts, self.written, save.parities, save.go_on, found)
        save.alarms = found
        save.has_commit()
        return []

    def _is_committed(self) -> bool:
        """Whether the coordinator has written COMMIT. SaveFailedError when it pins other parts than ours."""
        try:
            found = self.run.read_commit(self.save.attempt)
        except NotFoundError:
            return self._was_let_go()
        for rank in self.save.works:
            if rank in self.save.seen:  # else it has failed just now
                _check_pinned(found, self.save.seen[rank])
        with contextlib.suppress(CkptError):  # what looked wrong is told by other ranks too, and stays in the step
            self.save.alarms = step_alarms(self.run, self.save.attempt, found)
        return True

    def _was_let_go(self) -> bool:
        """Whether COMMIT came and went before this node looked: retention has deleted the step for a newer one.

        Told by the durable part written here, which a failed save leaves alone on other nodes, and by the newer step.
        """
        mine = next(iter(self.save.seen.values()), None)
        if mine is None or self.run.store.exists(self.run.key(self.save.attempt, mine.ref.name)):
            return False
        newest = next((state.attempt for state in self.run.live_steps() if state.commit is not None), None)
        return newest is not None and newest.step >= self.save.attempt.step

    def _look(self) -> bool:
        """List the attempt's folder; whether something new was in it."""
        names = set(self.run.store.list(self.save.attempt.folder))
        new = names - self.names
        self.names |= names
        for name in sorted(new):
            if _MARKER.fullmatch(name):
                self._read_marker(name)
        if self.save.coordinating:
            for rank in self.save.missing:
                name = part_name(rank, self.save.world)
                # Also one that was listed before: a keeper coordinates only once its rank 0 has begun.
                if name in self.names and rank not in self.save.works:
                    self.save.saw(commit.read_part(self.run, self.save.attempt, self.save.world, rank, name))
        if new:
            self.save.stirred()
        return bool(new)

    def _read_marker(self, name: str) -> None:
        raw = self.run.store.get(self.run.key(self.save.attempt, name), limit_nbytes=_MARKER_LIMIT_NBYTES)
        try:
            marker = msgspec.json.decode(raw, type=Marker)
        except msgspec.DecodeError as error:
            marker = Marker(SaveFailedError.__name__, f"{name}: unreadable ({error})", None)
        with self.save.changed:
            if self.save.failure is None:
                self.save.failure = Failure(marker.kind, marker.message, marker.rank, marker.exit_code)
        self.save.stirred()

    def _check_progress(self) -> None:
        """Fail the save when nothing has moved for too long, naming the ranks it waits for."""
        now, limit_s = time.monotonic(), self.save.progress_timeout_s
        if now - self.sized_at > limit_s / 4:
            self.sized_at = now
            self._measure()
        if now - self.save.progress_at <= limit_s:
            return
        with self.save.changed:
            missing = self.save.missing
            here = [
                _describe(rank, work, self.requests.of(work.thread))
                for rank, work in sorted(self.save.works.items())
                if rank in missing
            ]
        waiting = f"no part from {name_ranks(missing)} of {self.save.world}"
        if missing and not self.save.coordinating:
            others = [rank for rank in missing if rank not in self.save.works]
            waiting = f"no COMMIT from rank 0's node, which may wait for {name_ranks(others or missing)}"
        detail = f" ({'; '.join(here)})" if here else ""
        raise SaveFailedError(f"no progress for {limit_s:g} s: {waiting}{detail}")

    def _measure(self) -> None:
        """A file of another node that has grown is progress too."""
        if self.save.covers_world():
            return
        sizes: dict[str, int] = {}
        for name in self.names:
            with contextlib.suppress(CkptError):
                sizes[name] = self.run.store.size(self.run.key(self.save.attempt, name))
        if sizes != self.sizes:
            self.sizes = sizes
            self.save.stirred()

    # -- failure ---------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Stop this node's writing, tell the other nodes, remove what this node has written. Never raises."""
        save, failure = self.save, self.save.failure
        assert failure is not None
        least_s, most_s = _STOP_WRITING_S
        deadline = time.monotonic() + min(most_s, max(least_s, save.progress_timeout_s / 4))
        changes = 0
        while save.under_way and time.monotonic() < deadline:
            changes = save.wait(changes, POLL_LAST_S)
        debris = _debris_of(save, self.written)
        try:
            gone = remove_debris(self.run, debris)
            if not gone:
                save.debris = debris
            if not debris.alone and persist.uncommitted(self.run, save.attempt):
                self._write_marker(failure)
        except CkptError as error:
            log.problem(f"{save.run}: {save.attempt.folder}: debris is left: {error}")
        except BaseException:  # noqa: BLE001 - cleaning up must not hide why the save failed
            log.unexpected(f"{save.run}: cleaning up {save.attempt.folder}")

    def _write_marker(self, failure: Failure) -> None:
        rank = failure.rank if failure.rank is not None else min(self.save.works or self.save.lost or {0})
        if any(_MARKER.fullmatch(name) for name in self.names):
            return
        marker = Marker(failure.kind, failure.message, failure.rank, failure.exit_code)
        key = self.run.key(self.save.attempt, marker_name(rank, self.save.world))
        with contextlib.suppress(AlreadyExistsError):
            self.run.store.create(key, records.encode(marker))


def _debris_of(save: Save, written: Sequence[str] = ()) -> Debris:
    keys = [*written, *(key for work in save.works.values() for key in work.keys)]
    alone = save.covers_world(save.neighbours) and not save.under_way
    return Debris(save.attempt, tuple(keys), alone)


def remove_debris(run: Run, debris: Debris) -> bool:
    """Remove what is left of a failed save, unless it is a step; whether there is nothing more to do. Never raises."""
    try:
        if run.store.exists(run.key(debris.attempt, COMMIT)):
            return True  # a step, whoever has failed
        for key in debris.keys:
            with contextlib.suppress(CkptError):
                run.store.delete(key)
        if debris.alone:
            run.store.delete_folder(debris.attempt.folder)
            return True
        names = set(run.store.list(debris.attempt.folder))
    except CkptError as error:
        log.problem(f"{run.url}: {debris.attempt.folder}: debris is left: {error}")
        return False
    except BaseException:  # noqa: BLE001 - cleaning up must not hide why the save failed
        log.unexpected(f"{run.url}: cleaning up {debris.attempt.folder}")
        return False
    return names.isdisjoint(key.rpartition("/")[2] for key in debris.keys)


def sweep(run: Run, save: Save) -> None:
    """Once more, by a thread whose write came back when the save was over: nothing of it may be left. Never raises."""
    debris = _debris_of(save)
    if save.failure is not None and not remove_debris(run, debris):
        save.debris = debris


def _describe(rank: int, work: Work, request: Request | None) -> str:
    copied = "" if work.copied else f", its trainer{_fares(work.trainer_pid)} has copied {max(0, work.ready):,}"
    asked = "" if request is None else f"; its {request}"
    return f"rank {rank} has written {work.nbytes_written:,} of {work.nbytes:,} bytes{copied}{asked}"


def _fares(pid: int) -> str:
    found = condition(pid) if pid else ALIVE
    return f" (process {pid}) is {found} and" if found != ALIVE else ""


def _check_pinned(found: Commit, mine: SeenPart) -> None:
    pinned = found.parts[mine.rank] if mine.rank < len(found.parts) else None
    if pinned != mine.ref:
        raise SaveFailedError(
            f"COMMIT pins another part of rank {mine.rank} than the one written here; is there another job?"
        )
