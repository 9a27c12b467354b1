"""The trainer's side of the keeper: borrow an arena, fill it while the keeper writes it, hear what became of it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import Self

import msgspec

from ckpt.errors import CkptError, KeeperError, RankError, error_from_kind
from ckpt.format.commit import Attempt
from ckpt.keeper import protocol, start
from ckpt.keeper.arenas import ARENAS_PER_RANK
from ckpt.keeper.borrowing import ArenaView, Borrowing
from ckpt.keeper.pending import LOOK_S, PendingTask, check_process
from ckpt.keeper.place import Place, here
from ckpt.keeper.protocol import SaveResult, SaveTask
from ckpt.keeper.settle import answers, settle, statuses
from ckpt.processes import DEAD, STOPPED, condition

__all__ = ["ArenaView", "KeeperClient", "PendingTask", "SaveResult", "settle", "statuses"]

_READ_NBYTES = 1 << 20
_MAX_FDS = 16
_READER_S = 2.0  # how long the end of the reader is waited for
KEEPER_TIMEOUT_S = 30.0  # so long a keeper that lives may leave everything unanswered
_ASK_S = 10.0  # how often one that is waited for is asked


class KeeperClient:
    """One rank's connection to its job's keeper. Any thread may use it; a forked child may not."""

    def __init__(self, link: start.Link, place: Place, rank: int) -> None:
        self.rank = rank
        self.keeper_pid = link.pid
        self.job = link.job
        self._place = place
        self._pid = os.getpid()
        self._socket = link.socket
        self._frames = link.frames
        self._fds: deque[int] = deque()  # received, of grants that are not read yet
        self._lock = threading.Lock()  # of all below
        self._sending = threading.Lock()
        self._requests = 0
        self._pending: dict[int, PendingTask] = {}
        self._layouts: frozenset[str] = frozenset()  # digests of those that the task before had
        self._lost: KeeperError | None = None
        self._gone_for_good = False  # and everyone who waited for it knows
        self.lost: list[PendingTask] = []  # what was under way when the keeper went
        self._arenas = Borrowing(rank, self._number, self._send, self._look)
        self._answered_at = self._looked_at = time.monotonic()  # as ``_look`` knows; under ``_looking``
        self._looking = threading.Lock()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(KEEPER_TIMEOUT_S), 0))
        _clients.add(self)
        self._reader = threading.Thread(target=self._read_all, name="ckpt-keeper-client", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, rank: int) -> KeeperClient:
        """Connect to the job's keeper as ``rank``, starting it when there is none. Raises KeeperError."""
        place = here()
        return cls(start.join(place, rank), place, rank)

    @property
    def alive(self) -> bool:
        """Whether the keeper is there. If not, all it had under way has failed, and ``connect`` starts another one."""
        return not self._gone_for_good and os.getpid() == self._pid

    def arena(
        self,
        nbytes: int,
        run: str = "",
        timeout_s: float | None = None,
        *,
        snapshots: int = ARENAS_PER_RANK,
        budget_bytes: int | None = None,
    ) -> ArenaView:
        """Borrow one of this rank's ``snapshots`` (1 or 2) arenas of a run; waits until one is free.

        The memory is touched, so that filling it costs a copy and no page faults. Raises KeeperError when the node
        or a cgroup has not so much memory, or all arenas of the run on this node would exceed ``budget_bytes``;
        SaveFailedError when the store hangs with all; TimeoutError when all are being written for ``timeout_s``.
        """
        check_process(self._pid)  # before any lock: in a forked child another thread may have held it
        return self._arenas.borrow(nbytes, run, timeout_s, snapshots, budget_bytes)

    def held_nbytes(self, run: str = "") -> int:
        """How much of this rank's arenas of a run is in memory already, and needs no more of it."""
        return self._arenas.held_nbytes(run)

    def warm(
        self, nbytes: int, run: str = "", *, snapshots: int = ARENAS_PER_RANK, budget_bytes: int | None = None
    ) -> None:
        """Have this rank's arenas of a run touched in the background, so that the next saves need not do it.

        Never raises, and does nothing twice: what is wrong the next ``arena`` tells. One that comes meanwhile
        need not wait: it gets what has been touched so far, and touches the rest itself.
        """
        self._arenas.warm(nbytes, run, snapshots, budget_bytes)

    @property
    def is_warming(self) -> bool:
        """Whether arenas are being touched in the background."""
        return self._arenas.is_warming

    def release(self, arena: ArenaView) -> None:
        """Give an arena back whose snapshot is not wanted after all."""
        check_process(self._pid)
        self._arenas.give_back(arena.id)

    def begin(self, task: SaveTask) -> PendingTask:
        """Have the keeper persist an arena while it is filled; waits for nothing but the socket.

        Until its ``PendingTask.ready`` has come to the end, the end of this process fails the save.
        """
        check_process(self._pid)
        with self._lock:
            request = self._next_request()
            pending = PendingTask(task, lambda nbytes: self._say_ready(request, pending, nbytes), self._pid, self._look)
            self._pending[request] = pending
            brief, self._layouts = protocol.brief(task, self._layouts)
        try:
            self._send(protocol.Begin(request, brief))
        except CkptError:
            with self._lock:
                self._pending.pop(request, None)
                self.lost = [task for task in self.lost if task is not pending]  # its caller knows: nobody waits for it
                self._layouts = frozenset()
            raise
        return pending

    def abandon(
        self,
        run: str,
        attempt: Attempt,
        rank: int,
        world: int,
        message: str,
        exit_code: int = RankError.exit_code,
    ) -> None:
        """Say that ``rank``'s part of an attempt will never come, so that no other rank waits for it; free its arenas.

        ``exit_code`` is that of the cause. Never raises: it is called while another error is on its way.
        """
        with contextlib.suppress(KeeperError):
            check_process(self._pid)
            # Before its arena, which would say less about why.
            numbers = (attempt.step, attempt.writer, attempt.save)
            self._send(protocol.Abandon(run, *numbers, rank, world, message, exit_code))
            self._arenas.give_all_back()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no task is pending, whatever became of each; whether that was in time."""
        check_process(self._pid)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            pending = list(self._pending.values())
        for task in pending:
            try:
                task.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return False
            except CkptError:
                continue
        return True

    def close(self, done: bool = True) -> None:
        """Leave. When all ranks have left ``done`` the keeper finishes what is staged and ends; else it lingers."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(KeeperError):
            self._send(protocol.Bye(done))
        self._lose("this client was closed before the save was done; the keeper goes on with what was staged")
        # It has been woken. Else it might unmap arenas while the interpreter ends and looks for what is left to do.
        if threading.current_thread() is not self._reader:
            self._reader.join(_READER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sending ---------------------------------------------------------------------------

    def _number(self) -> int:
        with self._lock:
            return self._next_request()

    def _next_request(self) -> int:
        if self._lost is not None:
            raise self._lost
        self._requests += 1
        return self._requests

    def _send(self, message: msgspec.Struct) -> None:
        check_process(self._pid)
        frame = protocol.pack(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except BlockingIOError:
            self._lose(self._silent("has not taken a message"))
            assert self._lost is not None
            raise self._lost from None
        except OSError:
            self._lose(self._gone())
            assert self._lost is not None
            raise self._lost from None

    def _say_ready(self, request: int, pending: PendingTask, nbytes: int) -> None:
        if nbytes >= pending.end:
            self._arenas.filled(pending.arena)
        with contextlib.suppress(KeeperError):  # losing the keeper has failed the task already
            self._send(protocol.Ready(request, nbytes))

    # -- receiving; in the reader's thread ---------------------------------------------------

    def _read_all(self) -> None:
        why = self._gone()
        try:
            while (frame := self._next_frame()) is not None:
                self._take(protocol.message_of(frame, protocol.from_keeper))
        except OSError:
            pass
        except KeeperError as error:
            why = f"the keeper (pid {self.keeper_pid}) broke the protocol: {error}"
        self._lose(why)
        self._socket.close()  # here, where nobody can be reading from it
        while self._fds:
            os.close(self._fds.popleft())

    def _next_frame(self) -> bytes | None:
        while (frame := self._frames.frame()) is None:
            received, fds, _, _ = socket.recv_fds(self._socket, _READ_NBYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            self._fds.extend(fds)
            if not received:
                return None
            self._frames.feed(received)
        return frame

    def _take(self, message: protocol.FromKeeper) -> None:
        match message:
            case protocol.Staged():
                pending = self._pending.get(message.request)
                if pending is not None:
                    pending._update()  # noqa: SLF001 - the two classes are one thing
            case protocol.Saved():
                self._end_task(message.request, result=message.result)
            case protocol.ArenaGrant():
                if not self._fds:
                    raise KeeperError(f"arena {message.arena} came without its memory")
                self._arenas.came(message, self._fds.popleft())
            case protocol.Failed():
                error = error_from_kind(message.kind, message.message)
                if message.exit_code not in {0, error.exit_code}:
                    error.exit_code = message.exit_code
                if not message.request:
                    raise KeeperError(message.message)
                if not self._arenas.refused(message.request, error):
                    self._end_task(message.request, error=error, at_fault=message.at_fault)
            case _:
                raise KeeperError(f"an unexpected {type(message).__name__}")

    def _end_task(
        self,
        request: int,
        *,
        result: SaveResult | None = None,
        error: CkptError | None = None,
        at_fault: bool = False,
    ) -> None:
        with self._lock:
            pending = self._pending.pop(request, None)
        if pending is not None:
            pending._update(result, error, at_fault=at_fault)  # noqa: SLF001 - the two classes are one thing

    # -- a keeper that lives and does not answer -----------------------------------------------

    def _look(self) -> None:
        """Called every second by whoever waits: lose a keeper that is stopped, or hangs, for ``KEEPER_TIMEOUT_S``."""
        if not self._looking.acquire(blocking=False):
            return  # another thread looks
        try:
            now = time.monotonic()
            if now - self._looked_at > 5 * LOOK_S:  # nobody has waited meanwhile, or this process was stopped itself
                self._answered_at = now
            found, silent_s = condition(self.keeper_pid), now - self._answered_at
            if found == DEAD:  # the reading thread hears of it
                self._answered_at = now
            elif found != STOPPED and silent_s >= _ASK_S and answers(self._place):
                self._answered_at = time.monotonic()
            elif silent_s > KEEPER_TIMEOUT_S:
                self._lose(self._silent("is stopped, and has not answered" if found == STOPPED else "has not answered"))
            self._looked_at = time.monotonic()
        finally:
            self._looking.release()

    def _silent(self, how: str) -> str:
        return (
            f"the keeper (pid {self.keeper_pid}) {how} for {KEEPER_TIMEOUT_S:g} s; if it goes on (SIGCONT) it may "
            "still commit what it has staged, else end it (SIGKILL): the next save starts another one"
        )

    # -- ending ----------------------------------------------------------------------------

    def _gone(self) -> str:
        return (
            f"the keeper (pid {self.keeper_pid}) is gone, and with it the saves it had not committed; "
            f"committed steps are safe, and the next save starts another keeper (its log: {self._place.path('log')})"
        )

    def _lose(self, why: str) -> None:
        """No more is heard from the keeper: everything that waits for it fails."""
        with self._lock:
            if self._lost is None:
                self._lost = KeeperError(why)
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, and any sender
            pending = list(self._pending.values())
            self._pending.clear()
            lost = self._lost
            self.lost += pending
        for task in pending:
            task._update(error=lost)  # noqa: SLF001 - the two classes are one thing
        self._gone_for_good = True  # before whoever waits for an arena looks for another keeper
        self._arenas.lose(lost)

    def _disown(self) -> None:
        """In a forked child: let go of the socket, without any lock, since another thread may have held it."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


_clients: weakref.WeakSet[KeeperClient] = weakref.WeakSet()


def _disown_all() -> None:
    for client in list(_clients):
        client._disown()  # noqa: SLF001 - this module's own


os.register_at_fork(after_in_child=_disown_all)
