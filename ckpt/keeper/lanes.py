"""The keeper's threads: one writes for each rank of a run, one settles each run's saves, in call order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ckpt.errors import CkptError, KeeperError
from ckpt.format.part import DataFile
from ckpt.keeper import control, log, persist
from ckpt.keeper.pace import Pace, PacedSink
from ckpt.keeper.parity import Stored, write_parity
from ckpt.keeper.saves import DURABLE, FAILED, WRITING, Save, SaveAbandonedError, Work
from ckpt.run import Run
from ckpt.store.base import Sink


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
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._works: dict[int, queue.SimpleQueue[tuple[Save, Work] | None]] = {}
        threading.Thread(target=self._settle_all, name="settle", daemon=True).start()

    def begin(self, save: Save) -> None:
        """Settle a save after those that began before it."""
        self._saves.put(save)

    def write(self, save: Save, work: Work) -> None:
        """Persist a rank's work, as it becomes ready, after that rank's earlier ones."""
        rank = work.task.rank
        if rank not in self._works:
            works = self._works[rank] = queue.SimpleQueue()
            threading.Thread(target=self._write_all, args=(works,), name=f"write-{rank}", daemon=True).start()
        self._works[rank].put((save, work))

    def stop(self) -> None:
        """End its threads; nothing may be under way."""
        self._saves.put(None)
        for works in self._works.values():
            works.put(None)

    def _open(self) -> Run:
        with self._opening:
            if self._run is None:
                self._run = Run.open(self.url)
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
            try:
                warnings = control.settle(self._open(), save)
            except CkptError as error:
                save.fail(error, None)
            except BaseException as error:  # noqa: BLE001 - a thread that ended silently would leave its saves hanging
                log.unexpected(f"{self.url}: settling {save.attempt.folder}")
                save.fail(KeeperError(f"unexpected {type(error).__name__} in the keeper: {error}"), None)
            for warning in warnings:
                log.problem(f"{self.url}: {warning}")
            self._post(Settled(save, tuple(warnings), time.monotonic()))

    def _write_all(self, works: queue.SimpleQueue[tuple[Save, Work] | None]) -> None:
        while (next_work := works.get()) is not None:
            self._write(*next_work)
            self._post(Written(*next_work))
            del next_work  # a large task is not kept until the next one comes

    def _write(self, save: Save, work: Work) -> None:
        task = work.task
        save.set_state(work, WRITING)
        try:
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
