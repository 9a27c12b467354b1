"""The trainer's side of the keeper: borrow an arena, fill it while the keeper writes it, hear what became of it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec

from ckpt.errors import CkptError, KeeperError, error_from_kind
from ckpt.format.commit import Attempt
from ckpt.keeper import protocol, start
from ckpt.keeper.arenas import ARENAS_PER_RANK
from ckpt.keeper.mapping import Mapping
from ckpt.keeper.place import Place, here
from ckpt.keeper.protocol import SaveResult, SaveTask
from ckpt.keeper.settle import settle, statuses

__all__ = ["ArenaView", "KeeperClient", "PendingTask", "SaveResult", "settle", "statuses"]

_READ_NBYTES = 1 << 20
_MAX_FDS = 16
_WARM_NICENESS = 10  # training goes first


class ArenaView(msgspec.Struct, frozen=True):
    """Memory for one snapshot, this process's until all of it is ``ready``, or ``release``; still as it was left."""

    id: int
    nbytes: int
    view: memoryview  # writable bytes, page-aligned
    wait_s: float  # how long no arena was free


class PendingTask:
    """A task that the keeper works on behind the copy: ``ready`` tells it how far that has come."""

    def __init__(self, task: SaveTask, announce: Callable[[int], None], owner_pid: int) -> None:
        self.step = task.step
        self.arena = task.arena
        self.end = protocol.arena_end(task)
        self._announce = announce
        self._owner_pid = owner_pid
        self._changed = threading.Condition()
        self._staged = False
        self._result: SaveResult | None = None
        self._error: CkptError | None = None

    def ready(self, nbytes: int) -> None:
        """The arena's first ``nbytes`` are final; never less than before. At ``end`` the arena is the keeper's.

        Cheap, but a message: once in some MiB is enough. Call it up to the end whatever becomes of the save, or
        abandon the attempt. A save that has failed meanwhile, or a keeper that is gone, is told by ``wait``.
        """
        _check_process(self._owner_pid)
        self._announce(nbytes)

    @property
    def staged(self) -> bool:
        """Whether the keeper has acknowledged it: from then on the save does not need this process any more."""
        return self._staged

    @property
    def done(self) -> bool:
        """Whether the step is committed, or the save has failed."""
        return self._result is not None or self._error is not None

    @property
    def error(self) -> CkptError | None:
        """Why the save failed; None while it has not."""
        return self._error

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until it is staged. Raises what the keeper has against it, or TimeoutError."""
        self._wait(timeout_s, for_result=False)
        if not self._staged and self._error is not None:
            raise self._error

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """Wait until the step is committed. Raises what made the save fail, or TimeoutError."""
        self._wait(timeout_s, for_result=True)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _wait(self, timeout_s: float | None, *, for_result: bool) -> None:
        _check_process(self._owner_pid)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done or (self._staged and not for_result), timeout_s):
                what = "committed" if for_result else "staged"
                raise TimeoutError(f"step {self.step} is not {what} after {timeout_s:g} s")

    def _update(self, result: SaveResult | None = None, error: CkptError | None = None) -> None:
        """It is staged, or it has ended."""
        with self._changed:
            self._staged = self._staged or error is None
            if not self.done:
                self._result, self._error = result, error
            self._changed.notify_all()


class _Reply:
    """What a request is answered with."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self.grant: protocol.ArenaGrant | None = None
        self.fd = -1
        self.error: CkptError | None = None

    def come(self) -> None:
        self._come.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._come.wait(timeout_s)


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
        self._replies: dict[int, _Reply] = {}
        self._mappings: dict[int, Mapping] = {}
        self._borrowed: set[int] = set()
        self._warmed: dict[str, int] = {}  # run -> bytes
        self._lost: KeeperError | None = None
        _clients.add(self)
        threading.Thread(target=self._read_all, name="ckpt-keeper-client", daemon=True).start()

    @classmethod
    def connect(cls, rank: int) -> KeeperClient:
        """Connect to the job's keeper as ``rank``, starting it when there is none. Raises KeeperError."""
        place = here()
        return cls(start.join(place, rank), place, rank)

    @property
    def alive(self) -> bool:
        """Whether the keeper is there. If not, ``connect`` starts another one."""
        return self._lost is None and os.getpid() == self._pid

    def arena(self, nbytes: int, run: str = "", timeout_s: float | None = None) -> ArenaView:
        """Borrow one of this rank's two arenas of a run; waits until one is free.

        The memory is touched, so that filling it costs a copy and no page faults. Raises KeeperError
        when the node has not so much memory, SaveFailedError when the store hangs with both, and
        TimeoutError when both are still being written after ``timeout_s``.
        """
        _check_process(self._pid)  # before any lock: in a forked child another thread may have held it
        started = time.monotonic()
        reply = _Reply()
        with self._lock:
            request = self._next_request()
            self._replies[request] = reply
        self._send(protocol.ArenaRequest(request, run, nbytes))
        if not reply.wait(timeout_s):
            with self._lock:
                late = self._replies.pop(request, None) is not None
            if late:  # a grant that comes now is sent back by the reader
                raise TimeoutError(f"both arenas of rank {self.rank} are still being written after {timeout_s:g} s")
        if reply.error is not None:
            raise reply.error
        assert reply.grant is not None
        number = reply.grant.arena
        wait_s = time.monotonic() - started
        with self._lock:
            self._borrowed.add(number)
            mapping = self._mappings.get(number)
        try:
            if mapping is None or mapping.nbytes != reply.grant.nbytes:
                mapping = Mapping(reply.fd, reply.grant.nbytes)
            mapping.touch(nbytes)
        except KeeperError:
            self._give_back(number)
            raise
        finally:
            os.close(reply.fd)
        with self._lock:
            self._mappings[number] = mapping
        return ArenaView(number, nbytes, mapping.view[:nbytes], wait_s)

    def warm(self, nbytes: int, run: str = "") -> None:
        """Have both of this rank's arenas of a run touched in the background, so that the next saves need not do it.

        Never raises, and does nothing twice: what is wrong the next ``arena`` tells, and it takes what there is.
        """
        with self._lock:
            if self._warmed.get(run, -1) >= nbytes:
                return
            self._warmed[run] = nbytes
        threading.Thread(target=self._warm, args=(nbytes, run), name="ckpt-warm", daemon=True).start()

    def _warm(self, nbytes: int, run: str) -> None:
        with contextlib.suppress(CkptError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WARM_NICENESS)
            for _ in range(ARENAS_PER_RANK):
                self.release(self.arena(nbytes, run))

    def release(self, arena: ArenaView) -> None:
        """Give an arena back whose snapshot is not wanted after all."""
        _check_process(self._pid)
        self._give_back(arena.id)

    def begin(self, task: SaveTask) -> PendingTask:
        """Have the keeper persist an arena while it is filled; waits for nothing but the socket.

        Until its ``PendingTask.ready`` has come to the end, the end of this process fails the save.
        """
        _check_process(self._pid)
        with self._lock:
            request = self._next_request()
            pending = PendingTask(task, lambda nbytes: self._say_ready(request, pending, nbytes), self._pid)
            self._pending[request] = pending
        try:
            self._send(protocol.Begin(request, task))
        except CkptError:
            with self._lock:
                self._pending.pop(request, None)
            raise
        return pending

    def abandon(self, run: str, attempt: Attempt, rank: int, world: int, message: str) -> None:
        """Say that ``rank``'s part of an attempt will never come, so that no other rank waits for it; free its arenas.

        Never raises: it is called while another error is on its way.
        """
        with contextlib.suppress(KeeperError):
            _check_process(self._pid)
            # Before its arena, which would say less about why.
            self._send(protocol.Abandon(run, attempt.step, attempt.writer, attempt.save, rank, world, message))
            with self._lock:
                borrowed = list(self._borrowed)
            for number in borrowed:
                self._give_back(number)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no task is pending, whatever became of each; whether that was in time."""
        _check_process(self._pid)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sending ---------------------------------------------------------------------------

    def _next_request(self) -> int:
        if self._lost is not None:
            raise self._lost
        self._requests += 1
        return self._requests

    def _send(self, message: msgspec.Struct) -> None:
        _check_process(self._pid)
        frame = protocol.pack(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError:
            self._lose(self._gone())
            assert self._lost is not None
            raise self._lost from None

    def _say_ready(self, request: int, pending: PendingTask, nbytes: int) -> None:
        if nbytes >= pending.end:
            with self._lock:
                self._borrowed.discard(pending.arena)
        with contextlib.suppress(KeeperError):  # losing the keeper has failed the task already
            self._send(protocol.Ready(request, nbytes))

    def _give_back(self, number: int) -> None:
        with self._lock:
            borrowed = number in self._borrowed
            self._borrowed.discard(number)
        if borrowed:
            self._send(protocol.ArenaRelease(number))

    # -- receiving; in the reader's thread ---------------------------------------------------

    def _read_all(self) -> None:
        why = self._gone()
        try:
            while (frame := self._next_frame()) is not None:
                self._take(protocol.from_keeper.decode(frame))
        except OSError:
            pass
        except (KeeperError, msgspec.DecodeError, RecursionError) as error:
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
                self._take_grant(message, self._fds.popleft())
            case protocol.Failed():
                error = error_from_kind(message.kind, message.message)
                with self._lock:
                    reply = self._replies.pop(message.request, None)
                if reply is not None:
                    reply.error = error
                    reply.come()
                elif message.request:
                    self._end_task(message.request, error=error)
                else:
                    raise KeeperError(message.message)
            case _:
                raise KeeperError(f"an unexpected {type(message).__name__}")

    def _take_grant(self, grant: protocol.ArenaGrant, fd: int) -> None:
        with self._lock:
            reply = self._replies.pop(grant.request, None)
        if reply is None:  # it came too late
            os.close(fd)
            self._send(protocol.ArenaRelease(grant.arena))
            return
        reply.grant, reply.fd = grant, fd
        reply.come()

    def _end_task(self, request: int, *, result: SaveResult | None = None, error: CkptError | None = None) -> None:
        with self._lock:
            pending = self._pending.pop(request, None)
        if pending is not None:
            pending._update(result, error)  # noqa: SLF001 - the two classes are one thing

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
            pending, replies = list(self._pending.values()), list(self._replies.values())
            self._pending.clear()
            self._replies.clear()
            self._mappings.clear()  # unmapped when the last view is gone
            self._borrowed.clear()
            lost = self._lost
        for task in pending:
            task._update(error=lost)  # noqa: SLF001 - the two classes are one thing
        for reply in replies:
            reply.error = lost
            reply.come()

    def _disown(self) -> None:
        """In a forked child: let go of the socket, without any lock, since another thread may have held it."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


_clients: weakref.WeakSet[KeeperClient] = weakref.WeakSet()


def _disown_all() -> None:
    for client in list(_clients):
        client._disown()  # noqa: SLF001 - this module's own


os.register_at_fork(after_in_child=_disown_all)


def _check_process(owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        raise KeeperError(f"this connection belongs to process {owner_pid}, of which this one is a fork; connect anew")
