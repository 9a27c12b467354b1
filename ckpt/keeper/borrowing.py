"""This rank's arenas in its own process: asked for, mapped, touched, given back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import msgspec

from ckpt.errors import CkptError, KeeperError
from ckpt.keeper import protocol
from ckpt.keeper.mapping import Mapping
from ckpt.keeper.pending import LOOK_S

_WARM_NICENESS = 10  # training goes first


class ArenaView(msgspec.Struct, frozen=True):
    """Memory for one snapshot, this process's until all of it is ``ready``, or ``release``; still as it was left."""

    id: int
    nbytes: int
    view: memoryview  # writable bytes, page-aligned
    wait_s: float  # how long no arena was free


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


class _Warming:
    """A thread that touches arenas, and may be told to stop."""

    def __init__(self) -> None:
        self.stop = False
        self.request = 0  # the arena it waits for
        self.over = threading.Event()


class Borrowing:
    """What a client has of its keeper's arenas. Any thread may use it.

    ``next_request`` numbers a request, ``send`` sends a message; both raise KeeperError when the keeper is gone.
    ``look`` is called every second that someone waits: it loses a keeper that does not answer.
    """

    def __init__(
        self,
        rank: int,
        next_request: Callable[[], int],
        send: Callable[[msgspec.Struct], None],
        look: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._next_request = next_request
        self._send = send
        self._look = look
        self._lock = threading.Lock()  # of all below
        self._replies: dict[int, _Reply] = {}
        self._mappings: dict[str, dict[int, Mapping]] = {}  # run -> arena -> what is mapped of it
        self._borrowed: set[int] = set()
        self._warmed: dict[tuple[str, int], int] = {}  # run, arenas -> bytes that were touched, or could not be
        self._warming: _Warming | None = None

    def borrow(
        self, nbytes: int, run: str, timeout_s: float | None, snapshots: int, budget_bytes: int | None
    ) -> ArenaView:
        """See ``KeeperClient.arena``."""
        started = time.monotonic()
        self._end_warming()
        request, reply = self._request(nbytes, run, snapshots, budget_bytes)
        if not self._await(reply, timeout_s):
            if self._take_back(request):
                which = "both arenas" if snapshots > 1 else "the arena"
                raise TimeoutError(
                    f"{which} of rank {self._rank} {'are' if snapshots > 1 else 'is'} still being written "
                    f"after {timeout_s:g} s"
                )
            reply.wait(None)  # it is being read
        number, mapping = self._map(reply, run)
        wait_s = time.monotonic() - started
        try:
            mapping.touch(nbytes)
        except KeeperError:
            self.give_back(number)
            raise
        return ArenaView(number, nbytes, mapping.view[:nbytes], wait_s)

    def _await(self, reply: _Reply, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if reply.wait(max(0.0, left_s)):
                return True
            if left_s < LOOK_S:
                return False
            self._look()

    def filled(self, number: int) -> None:
        """An arena is the keeper's now."""
        with self._lock:
            self._borrowed.discard(number)

    def give_back(self, number: int) -> None:
        """Send an arena back that was not filled; nothing if it is not borrowed."""
        with self._lock:
            borrowed = number in self._borrowed
            self._borrowed.discard(number)
        if borrowed:
            self._send(protocol.ArenaRelease(number))

    def give_all_back(self) -> None:
        """The same for all that are borrowed."""
        with self._lock:
            borrowed = list(self._borrowed)
        for number in borrowed:
            self.give_back(number)

    def held_nbytes(self, run: str) -> int:
        """See ``KeeperClient.held_nbytes``."""
        with self._lock:
            return sum(mapping.touched for mapping in self._mappings.get(run, {}).values())

    @property
    def is_warming(self) -> bool:
        """Whether arenas are being touched in the background."""
        return self._warming is not None

    def warm(self, nbytes: int, run: str, snapshots: int, budget_bytes: int | None) -> None:
        """See ``KeeperClient.warm``."""
        with self._lock:
            if self._warmed.get((run, snapshots), -1) >= nbytes or self._warming is not None:
                return
            self._warmed[run, snapshots] = nbytes
            warming = self._warming = _Warming()
        arguments = (warming, nbytes, run, snapshots, budget_bytes)
        try:
            threading.Thread(target=self._warm, args=arguments, name="ckpt-warm", daemon=True).start()
        except RuntimeError:  # no more threads for this process
            self._warming = None

    def _warm(self, warming: _Warming, nbytes: int, run: str, snapshots: int, budget_bytes: int | None) -> None:
        borrowed: list[int] = []
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WARM_NICENESS)
            with self._lock:
                ready = sum(mapping.touched >= nbytes for mapping in self._mappings.get(run, {}).values())
            for _ in range(snapshots - ready):
                _, reply = self._request(nbytes, run, snapshots, budget_bytes, warming)
                reply.wait(None)
                number, mapping = self._map(reply, run)
                borrowed.append(number)  # and kept until all are: the next one must be another
                mapping.touch(nbytes, lambda: warming.stop)
        except (CkptError, OSError):
            pass
        finally:
            with contextlib.suppress(CkptError):
                for number in borrowed:
                    self.give_back(number)
            with self._lock:
                self._warming = None
                if warming.stop:
                    self._warmed.pop((run, snapshots), None)
            warming.over.set()

    def _end_warming(self) -> None:
        """Whoever wants to save now has the first claim on what is being touched."""
        with self._lock:
            warming = self._warming
            if warming is None:
                return
            warming.stop = True
            reply = self._replies.pop(warming.request, None)
        if reply is not None:
            reply.error = KeeperError("taken back: a save comes first")
            reply.come()
        warming.over.wait()

    def _request(
        self, nbytes: int, run: str, snapshots: int, budget_bytes: int | None, warming: _Warming | None = None
    ) -> tuple[int, _Reply]:
        reply, request = _Reply(), self._next_request()
        with self._lock:
            if warming is not None and warming.stop:
                raise KeeperError("not asked for: a save comes first")
            self._replies[request] = reply
            if warming is not None:
                warming.request = request
        self._send(protocol.ArenaRequest(request, run, nbytes, snapshots, budget_bytes))
        return request, reply

    def _take_back(self, request: int) -> bool:
        """No more wait for an arena; whether it has not come yet. If it comes now, the reader sends it back."""
        with self._lock:
            return self._replies.pop(request, None) is not None

    def _map(self, reply: _Reply, run: str) -> tuple[int, Mapping]:
        """The arena that came, borrowed now, and its memory. Raises what came instead."""
        if reply.error is not None:
            raise reply.error
        grant = reply.grant
        assert grant is not None
        try:
            with self._lock:
                self._borrowed.add(grant.arena)
                known = self._mappings.setdefault(run, {})
                for number in known.keys() - set(grant.arenas) - self._borrowed:
                    del known[number]  # the keeper has given its memory back, and only our mapping would keep it
                mapping = known.get(grant.arena)
            if mapping is None or mapping.nbytes != grant.nbytes:
                mapping = Mapping(reply.fd, grant.nbytes)
                with self._lock:
                    known[grant.arena] = mapping
        except KeeperError:
            self.give_back(grant.arena)
            raise
        finally:
            os.close(reply.fd)
        return grant.arena, mapping

    # -- what the keeper answers; in the client's reading thread ------------------------------

    def came(self, grant: protocol.ArenaGrant, fd: int) -> None:
        """An arena was granted, with its memory."""
        with self._lock:
            reply = self._replies.pop(grant.request, None)
        if reply is None:  # it came too late
            os.close(fd)
            self._send(protocol.ArenaRelease(grant.arena))
            return
        reply.grant, reply.fd = grant, fd
        reply.come()

    def refused(self, request: int, error: CkptError) -> bool:
        """A request was answered with an error; whether it was one for an arena."""
        with self._lock:
            reply = self._replies.pop(request, None)
        if reply is not None:
            reply.error = error
            reply.come()
        return reply is not None

    def lose(self, error: CkptError) -> None:
        """The keeper is gone: everybody who waits is told, and memory goes when the last view of it does."""
        with self._lock:
            replies = list(self._replies.values())
            self._replies.clear()
            self._mappings.clear()
            self._borrowed.clear()
        for reply in replies:
            reply.error = error
            reply.come()
