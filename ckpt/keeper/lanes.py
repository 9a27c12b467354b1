"""The keeper's threads: one writes for each rank of a run, one settles each run's saves, in call order.

What is deleted after a COMMIT is the business of a third (``retention``), which holds up neither.

A request to a store that never returns takes its thread with it, for no system call can be called off. Such a thread
is left behind and another one does the next save's work; should the request return after all, the thread removes what
it has written, and ends. How many may be left behind is bounded: writes by the arenas that they read, two per rank;
all others by ``LEFT_BEHIND``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ckpt.errors import CkptError, KeeperError, StoreError
from ckpt.format.commit import COMMIT
from ckpt.format.part import DataFile
from ckpt.keeper import control, log, persist
from ckpt.keeper.alarms import Memory
from ckpt.keeper.pace import Pace, PacedSink
from ckpt.keeper.parity import Stored, write_parity
from ckpt.keeper.requests import Request, Requests, WatchedStore
from ckpt.keeper.retention import Retention
from ckpt.keeper.saves import DURABLE, FAILED, WRITING, Debris, Save, SaveAbandonedError, Work
from ckpt.run import Run
from ckpt.store import open_store
from ckpt.store.base import Sink

LEFT_BEHIND = 4  # threads that settled a run's saves and hang; from then on its saves fail at once, until one returns
_CLEAN_UP_S = 30.0  # how long one request may take that cleans up after a save which was given up before it began
_LOOK_AGAIN_S = 0.5
_REMEMBERED_DEBRIS = 64


class Written(msgspec.Struct, frozen=True):
    """A work is durable or has failed: nothing reads its arena any more."""

    save: Save
    work: Work


class Settled(msgspec.Struct, frozen=True):
    """A save is a step, or has failed (``save.failure``)."""

    save: Save
    warnings: tuple[str, ...]
    at: float  # time.monotonic()


Post = Callable[[Written | Settled], None]


class Lane:
    """All of one run's work in this keeper. Commits follow the order in which saves began.

    ``post`` is called from its threads with what has ended.
    """

    def __init__(self, url: str, post: Post) -> None:
        self.url = url
        self._post = post
        self._opening = threading.Lock()
        self._run: Run | None = None
        self._pace = Pace()
        self._memories: dict[int, Memory] = {}  # by rank
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._works: dict[int, queue.SimpleQueue[tuple[Save, Work] | None]] = {}
        self._requests = Requests()
        self._retention = Retention(url, self._open, self._requests, self._post_settled)
        self._lock = threading.Lock()  # of the three below
        self._writers: dict[int, threading.Thread] = {}  # rank -> who writes what comes next
        self._left_behind: dict[threading.Thread, Request] = {}  # that settled a save and hang
        self._debris: deque[Debris] = deque(maxlen=_REMEMBERED_DEBRIS)  # removed after the next COMMIT
        threading.Thread(target=self._settle_all, name="settle", daemon=True).start()

    def begin(self, save: Save) -> None:
        """Settle a save after those that began before it."""
        self._saves.put(save)

    def write(self, save: Save, work: Work) -> None:
        """Persist a rank's work, as it becomes ready, after that rank's earlier ones."""
        rank = work.task.rank
        if rank not in self._works:
            self._works[rank] = queue.SimpleQueue()
            with self._lock:
                self._start_writer(rank)
        self._works[rank].put((save, work))

    def stop(self) -> None:
        """End its threads; nothing may be under way."""
        self._saves.put(None)
        self._retention.stop()
        for works in self._works.values():
            works.put(None)

    def _open(self) -> Run:
        with self._requests.under_way("open", self.url), self._opening:
            if self._run is None:
                self._run = Run(WatchedStore(open_store(self.url), self._requests))
            return self._run

    def _paced(self, sink: Sink, save: Save, work: Work) -> Sink:
        mbps = work.task.max_write_mbps
        return sink if mbps is None else PacedSink(sink, self._pace, mbps, save.rest)

    def _add_parity(self, save: Save, work: Work, files: Sequence[DataFile]) -> None:
        ranks = work.task.parity_ranks
        if not ranks:
            return
        everyone = save.join(Stored(work.task, tuple(files), work.arena.view), ranks)
        if everyone is not None:
            ref = write_parity(
                self._open(),
                save.attempt,
                everyone,
                work.keys,
                report=lambda nbytes: save.wrote(work, nbytes),
                through=lambda sink: self._paced(sink, save, work),
            )
            save.has_parity(min(ranks), ref)

    def _settle_all(self) -> None:
        while (save := self._saves.get()) is not None:
            warnings: list[str] = []
            if self._may_ask(save):
                self._settle_watched(save, warnings)
            for warning in warnings:
                log.problem(f"{self.url}: {warning}")
            self._replace_writers(save)
            settled = (save, tuple(warnings), time.monotonic())
            if not self._retention.takes(*settled):
                self._post_settled(*settled)

    def _post_settled(self, save: Save, warnings: tuple[str, ...], at: float) -> None:
        self._post(Settled(save, warnings, at))

    def _settle_watched(self, save: Save, warnings: list[str]) -> None:
        """Have a thread settle the save, and leave it behind when a single request of it takes too long."""
        name = f"settle-{save.attempt.label}"
        thread = threading.Thread(target=self._settle, args=(save, warnings), name=name, daemon=True)
        limit_s = save.progress_timeout_s or _CLEAN_UP_S
        thread.start()
        while thread.is_alive():
            thread.join(min(_LOOK_AGAIN_S, limit_s / 4))
            request = self._requests.of(thread)
            if request is not None and request.age_s > limit_s and thread.is_alive():
                self._leave_behind(thread, save, request)
                return

    def _settle(self, save: Save, warnings: list[str]) -> None:
        try:
            warnings += control.settle(self._open(), save, self._requests)
        except CkptError as error:
            save.fail(error, None)
        except BaseException as error:  # noqa: BLE001 - a thread that ended silently would leave its saves hanging
            log.unexpected(f"{self.url}: settling {save.attempt.folder}")
            save.fail(KeeperError(f"unexpected {type(error).__name__} in the keeper: {error}"), None)
        self._remember_debris(save)
        if save.committed:
            self._remove_debris()
        with self._lock:
            late = self._left_behind.pop(threading.current_thread(), None)
        if late is not None:
            end = "the step exists" if save.committed else "the step does not exist"
            log.say(f"{self.url}: {save.attempt.folder}: {late.what} of {late.where} has returned; {end}")

    def _remember_debris(self, save: Save) -> None:
        if save.debris is not None:
            with self._lock:
                self._debris.append(save.debris)
            save.debris = None

    def _remove_debris(self) -> None:
        """The storage works again: what it did not let go before is removed now."""
        with self._lock:
            left = list(self._debris)
        for debris in left:
            if control.remove_debris(self._open(), debris):
                with self._lock, contextlib.suppress(ValueError):  # another thread was quicker
                    self._debris.remove(debris)

    def _leave_behind(self, thread: threading.Thread, save: Save, request: Request) -> None:
        with self._lock:
            self._left_behind[thread] = request
        with save.changed:
            if save.committed:
                return
            later = "; should it return, the step may still appear" if request.where.endswith(COMMIT) else ""
            save.fail(
                StoreError(f"the store hangs: {request}; see to the storage (mount, network, dmesg){later}"), None
            )
        log.problem(f"{self.url}: {save.attempt.folder}: left to itself: {request}")

    def _may_ask(self, save: Save) -> bool:
        """Whether another thread may be risked on this store; fails the save if not."""
        with self._lock:
            hanging = list(self._left_behind.values())
        if len(hanging) < LEFT_BEHIND:
            return True
        save.fail(
            StoreError(
                f"the store hangs: {len(hanging)} requests have not returned, among them {hanging[0]}; no save is "
                "tried until one does: see to the storage (mount, network, dmesg), or start the job's keeper again"
            ),
            None,
        )
        return False

    def _start_writer(self, rank: int) -> None:
        writer = threading.Thread(target=self._write_all, args=(rank,), name=f"write-{rank}", daemon=True)
        self._writers[rank] = writer
        writer.start()

    def _replace_writers(self, save: Save) -> None:
        """Who still writes for a save that is over may never come back: someone else writes what comes next."""
        for rank, work in list(save.works.items()):
            with self._lock:
                if work.state == WRITING and self._writers.get(rank) is work.thread:
                    log.problem(f"{self.url}: {save.attempt.folder}: the write of rank {rank} is left to itself")
                    self._start_writer(rank)

    def _write_all(self, rank: int) -> None:
        works, this = self._works[rank], threading.current_thread()
        while (next_work := works.get()) is not None:
            save, work = next_work
            work.thread = this
            self._write(save, work)
            with self._lock:
                replaced = self._writers[rank] is not this
            if replaced:
                control.sweep(self._open(), save)
                self._remember_debris(save)
            self._post(Written(save, work))
            if replaced:
                return
            del next_work, save, work  # a large task is not kept until the next one comes

    def _write(self, save: Save, work: Work) -> None:
        task = work.task
        save.set_state(work, WRITING)
        try:
            if save.failure is None:
                self._may_ask(save)
            save.wrote(work, 0)  # raises when the save has failed already
            started = time.monotonic()
            part = persist.persist(
                self._open(),
                task,
                work.arena.view,
                work.keys,
                await_ready=lambda nbytes: save.await_ready(work, nbytes),
                report=lambda nbytes: save.wrote(work, nbytes),
                through=lambda sink: self._paced(sink, save, work),
                together=lambda files: self._add_parity(save, work, files),
                memory=self._memories.setdefault(task.rank, Memory()),
            )
            work.write_s = time.monotonic() - started
            save.saw(part)
        except SaveAbandonedError:
            save.set_state(work, FAILED)
        except CkptError as error:
            save.fail(error, task.rank)
            save.set_state(work, FAILED)
        except BaseException as error:  # noqa: BLE001 - as above
            log.unexpected(f"{self.url}: writing rank {task.rank} of {save.attempt.folder}")
            save.fail(KeeperError(f"unexpected {type(error).__name__} in the keeper: {error}"), task.rank)
            save.set_state(work, FAILED)
        else:
            save.set_state(work, DURABLE)
