"""From parts to a step: wait until every rank of a save is durable, then commit it, or see it committed.

The store alone is the truth. What this node's ranks do is known at once; what other nodes do is
seen by looking into the attempt's folder: their parts, the marker that says that one has failed,
and COMMIT.
"""

from __future__ import annotations

import contextlib
import re
import time

import msgspec

from ckpt.errors import AlreadyExistsError, CkptError, KeeperError, NotFoundError, SaveFailedError, error_from_kind
from ckpt.format import records
from ckpt.format.commit import Commit
from ckpt.format.part import part_name
from ckpt.keeper import commit, log, persist
from ckpt.keeper.saves import Failure, Save, SeenPart, Work, name_ranks
from ckpt.run import Run

POLL_FIRST_S = 0.05
POLL_LAST_S = 0.5
_POLL_GROWTH = 1.3
_MARKER_LIMIT_NBYTES = 1 << 20
_STOP_WRITING_S = 10.0

_MARKER = re.compile(r"failed-\d{5,}-of-\d{5,}\.json")


class Marker(msgspec.Struct, frozen=True):
    """``failed-00003-of-00008.json``: tells the other nodes that this save will not become a step."""

    kind: str
    message: str
    rank: int | None


def marker_name(rank: int, world: int) -> str:
    """The marker's name for the failure of ``rank``."""
    return f"failed-{rank:05d}-of-{world:05d}.json"


def settle(run: Run, save: Save) -> list[str]:
    """Wait until the save is a step; returns warnings. Raises CkptError when it is none, after cleaning up."""
    settling = _Settling(run, save)
    try:
        return settling.run_to_the_end()
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

    def __init__(self, run: Run, save: Save) -> None:
        self.run = run
        self.save = save
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
        commit.create_commit(self.run, task, parts, self.written, save.parities)
        return commit.retain(self.run, save.attempt, task.keep_last, task.keep_every)

    def _is_committed(self) -> bool:
        """Whether the coordinator has written COMMIT. SaveFailedError when it pins other parts than ours."""
        try:
            found = self.run.read_commit(self.save.attempt)
        except NotFoundError:
            return self._was_let_go()
        for rank in self.save.works:
            if rank in self.save.seen:  # else it has failed just now
                _check_pinned(found, self.save.seen[rank])
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
                self.save.failure = Failure(marker.kind, marker.message, marker.rank)
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
            here = [_describe(rank, work) for rank, work in sorted(self.save.works.items()) if rank in missing]
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
        deadline = time.monotonic() + _STOP_WRITING_S
        changes = 0
        while save.under_way and time.monotonic() < deadline:
            changes = save.wait(changes, POLL_LAST_S)
        try:
            if not persist.uncommitted(self.run, save.attempt):
                return  # a step, whoever else has failed; or the store cannot tell
            keys = [*self.written, *(key for work in save.works.values() for key in work.keys)]
            persist.remove(self.run, save.attempt, keys)
            if save.covers_world(save.neighbours) and not save.under_way:
                self.run.store.delete_folder(save.attempt.folder)
            else:
                self._write_marker(failure)
        except CkptError as error:
            log.problem(f"{save.run}: {save.attempt.folder}: debris is left: {error}")
        except BaseException:  # noqa: BLE001 - cleaning up must not hide why the save failed
            log.unexpected(f"{save.run}: cleaning up {save.attempt.folder}")

    def _write_marker(self, failure: Failure) -> None:
        rank = failure.rank if failure.rank is not None else min(self.save.works or self.save.lost or {0})
        if any(_MARKER.fullmatch(name) for name in self.names):
            return
        marker = Marker(failure.kind, failure.message, failure.rank)
        key = self.run.key(self.save.attempt, marker_name(rank, self.save.world))
        with contextlib.suppress(AlreadyExistsError):
            self.run.store.create(key, records.encode(marker))


def _describe(rank: int, work: Work) -> str:
    copied = "" if work.copied else f", its trainer has copied {max(0, work.ready):,}"
    return f"rank {rank} has written {work.nbytes_written:,} of {work.nbytes:,} bytes{copied}"


def _check_pinned(found: Commit, mine: SeenPart) -> None:
    pinned = found.parts[mine.rank] if mine.rank < len(found.parts) else None
    if pinned != mine.ref:
        raise SaveFailedError(
            f"COMMIT pins another part of rank {mine.rank} than the one written here; is there another job?"
        )
