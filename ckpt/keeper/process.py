"""The keeper's main thread: clients come and go, and it ends with its job."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

import msgspec

from ckpt.errors import CkptError, KeeperError
from ckpt.keeper import log, protocol
from ckpt.keeper.arenas import Wanted
from ckpt.keeper.connection import Connection
from ckpt.keeper.lanes import Settled, Written
from ckpt.keeper.memory import available_nbytes
from ckpt.keeper.place import Place
from ckpt.keeper.registry import Registry
from ckpt.keeper.start import locked
from ckpt.processes import process_identity

LINGER_S = 20.0
FIRST_CLIENT_S = 30.0
HANDSHAKE_S = 5.0
MAX_STRANGERS = 128  # connections that have not proved themselves; as many may wait to be accepted
HALF_CLOSED_S = 5.0  # a process that dies closes its socket a moment before its pidfd tells
_END_AGAIN_S = 0.05


class Keeper:
    """One keeper. ``listener`` listens on the place's socket already; ``serve`` returns when the job is done."""

    def __init__(self, listener: socket.socket, place: Place, secret: bytes, linger_s: float = LINGER_S) -> None:
        self._listener = listener
        self._place = place
        self._secret = secret
        self._linger_s = linger_s
        self._registry = Registry(self._answer, self._post)
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Written | Settled] = deque()
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._half_closed: dict[int, float] = {}  # connection -> since when its socket has been closed
        self._lost: dict[int, float] = {}  # rank -> when it left without saying that it is done
        self._started = time.monotonic()
        self._had_client = False
        self._stopping = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (listener, self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)

    def serve(self) -> None:
        """Serve until every client has left and no work is left, then leave nothing behind."""
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        while not self._has_ended():
            for key, _ in self._selector.select(self._wait_s()):
                if self._selector.get_map().get(key.fd) == key:  # else an earlier event has closed it
                    key.data()
            while self._posted:
                event = self._posted.popleft()
                if isinstance(event, Written):
                    self._registry.written(event)
                else:
                    self._registry.settled(event)
            self._look_at_the_clock()

    # -- waking ----------------------------------------------------------------------------

    def _post(self, event: Written | Settled) -> None:
        """Called from the lanes' threads."""
        self._posted.append(event)
        with contextlib.suppress(BlockingIOError):  # full of other reasons to wake
            self._wake_writer.send(b"\0")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Schedulers signal all processes of a job at once, and its trainers may still make their last save.
        log.say(f"{signal.Signals(number).name}: ends when the connected trainers have left and staged saves are done")
        self._stopping = True

    # -- ending ----------------------------------------------------------------------------

    def _ends_at(self) -> float:
        """When to end, if nothing else happens before; infinite while there is something to do."""
        if any(c.rank is not None or not c.welcome for c in self._connections.values()):
            return float("inf")
        busy_until = self._registry.busy_until()
        if busy_until is not None:
            return busy_until
        if self._stopping:
            return 0.0
        if not self._had_client:
            return self._started + FIRST_CLIENT_S
        return max((left + self._linger_s for left in self._lost.values()), default=0.0)

    def _wait_s(self) -> float | None:
        times = [self._ends_at()]
        times += [c.opened + HANDSHAKE_S for c in self._connections.values() if not c.welcome]
        times += [since + HALF_CLOSED_S for since in self._half_closed.values()]
        soonest = min(times)
        return None if soonest == float("inf") else max(_END_AGAIN_S, soonest - time.monotonic())

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            half_closed = now - self._half_closed.get(connection.number, now) > HALF_CLOSED_S
            if half_closed or (not connection.welcome and now - connection.opened > HANDSHAKE_S):
                self._drop(connection)
        if self._connections:  # the job goes on without the ranks that did not come back
            self._registry.pool.drop_ranks(r for r, left in self._lost.items() if now > left + self._linger_s)

    def _has_ended(self) -> bool:
        """End if it is time: see, under the lock, that nobody has come meanwhile, and remove this keeper's files."""
        if time.monotonic() < self._ends_at():
            return False
        try:
            with locked(self._place, timeout_s=0.0):
                self._accept()
                if time.monotonic() < self._ends_at():
                    return False
                log.say("the job is done")
                if self._owns_place():
                    for suffix in ("sock", "secret", *(() if log.worth_keeping() else ("log",)), "lock"):
                        with contextlib.suppress(OSError):
                            os.unlink(self._place.path(suffix))
        except KeeperError:  # someone is connecting
            return False
        return True

    def _owns_place(self) -> bool:
        with contextlib.suppress(OSError), open(self._place.path("lock")) as lock:
            # Empty: whoever started a keeper here died before it could say which; nobody is to be found here.
            return lock.read() in {"", process_identity(os.getpid())}
        return False

    # -- clients ---------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(MAX_STRANGERS):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._numbers += 1
            connection = Connection(self._numbers, sock)
            if connection.uid != os.geteuid():
                log.problem(f"refused process {connection.pid} of user {connection.uid}")
                connection.close()
                continue
            strangers = [other for other in self._connections.values() if not other.welcome]
            if len(strangers) >= MAX_STRANGERS:  # descriptors are few; whoever means it comes again
                self._drop(strangers[0])
            self._connections[connection.number] = connection
            self._selector.register(sock, selectors.EVENT_READ, _bound(self._ready, connection))
            if connection.pidfd is not None:
                self._selector.register(connection.pidfd, selectors.EVENT_READ, _bound(self._dead, connection))

    def _ready(self, connection: Connection) -> None:
        """The client has sent something, has room for more, or has closed."""
        try:
            messages = connection.receive(self._secret, self._place.job)
            if connection.welcome and not connection.known:
                self._came(connection)
            for message in messages:
                if connection.number in self._connections and not connection.closing:  # not after its bye
                    self._take(connection, message)
        except KeeperError as error:
            self._refuse(connection, error)
        except CkptError as error:
            self._refuse(connection, KeeperError(f"{type(error).__name__}: {error}"))
        except Exception as error:  # noqa: BLE001 - one client's message must not end the keeper for all
            log.unexpected(f"process {connection.pid}")
            self._refuse(connection, KeeperError(f"unexpected {type(error).__name__} in the keeper: {error}"))
        if connection.number in self._connections:
            self._go_on(connection)

    def _refuse(self, connection: Connection, error: KeeperError) -> None:
        log.problem(f"process {connection.pid}: {error}")
        connection.send(protocol.Failed(0, type(error).__name__, str(error)))
        connection.closing = True

    def _go_on(self, connection: Connection) -> None:
        """Wait for what comes next, or close."""
        sent = connection.flush()
        if connection.closing and (sent or connection.eof):
            self._drop(connection)
        elif connection.eof:
            if connection.rank is None or connection.pidfd is None:
                self._drop(connection, died=process_identity(connection.pid) == "")
            elif connection.number not in self._half_closed:
                self._selector.unregister(connection.socket)
                self._half_closed[connection.number] = time.monotonic()
        else:
            key = self._selector.get_key(connection.socket)
            events = selectors.EVENT_READ | (0 if sent else selectors.EVENT_WRITE)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)

    def _came(self, connection: Connection) -> None:
        connection.known = True
        if connection.rank is not None:
            self._had_client = True
            self._lost.pop(connection.rank, None)
            self._registry.rank_came(connection.rank)
            log.say(f"rank {connection.rank} is here (process {connection.pid})")

    def _dead(self, connection: Connection) -> None:
        """The client's process has ended; what it sent before counts."""
        if connection.number not in self._half_closed:
            self._ready(connection)
        if connection.number in self._connections:
            self._drop(connection, died=True)

    def _drop(self, connection: Connection, *, died: bool = False, done: bool = False) -> None:
        """Forget a connection. ``done``: its rank said that it does not come back."""
        if self._half_closed.pop(connection.number, None) is None:
            self._selector.unregister(connection.socket)
        if connection.pidfd is not None:
            self._selector.unregister(connection.pidfd)
        del self._connections[connection.number]
        connection.close()
        how = f"process {connection.pid}) {'died' if died else 'left'}"
        self._registry.connection_left(connection.number, how, done=done)
        rank = connection.rank
        if rank is None:
            return
        if done:  # ranks that were lost before this one came belong to an earlier start of the job
            self._lost = {other: left for other, left in self._lost.items() if left > connection.opened}
            return
        if all(other.rank != rank for other in self._connections.values()):
            self._lost[rank] = time.monotonic()
        if died:
            log.say(f"rank {rank} (process {connection.pid}) has died")
            self._registry.rank_died(rank, connection.pid, self._numbers)

    # -- messages --------------------------------------------------------------------------

    def _take(self, connection: Connection, message: protocol.FromClient) -> None:
        said = message.task if isinstance(message, protocol.Begin) else message
        if (
            isinstance(said, protocol.SaveTask | protocol.Abandon)
            and said.rank != connection.rank
            and 0 <= said.rank < said.world  # else it is nobody's, which the registry says
        ):
            raise KeeperError(f"rank {connection.rank} (process {connection.pid}) speaks for rank {said.rank}")
        ranks = {c.rank for c in self._connections.values() if c.rank is not None}
        match message:
            case protocol.StatusRequest():
                connection.send(self._status(message.request))
            case protocol.Bye():
                self._drop(connection, done=message.done)
            case protocol.ArenaRequest() if connection.rank is not None:
                wanted = Wanted(
                    connection.number, message.request, message.nbytes, message.snapshots, message.budget_bytes
                )
                self._registry.request_arena(message.run, connection.rank, wanted)
            case protocol.ArenaRelease():
                self._registry.release(connection.number, message.arena)
            case protocol.Begin() if connection.rank is not None:
                task, connection.layouts = protocol.whole(message.task, connection.layouts)
                self._registry.begin(connection.number, message.request, task, ranks, connection.pid)
            case protocol.Ready():
                self._registry.ready(connection.number, message.request, message.nbytes)
            case protocol.Abandon() if connection.rank is not None:
                self._registry.abandon(message, ranks)
            case _:
                raise KeeperError(f"process {connection.pid} sent an unexpected {type(message).__name__}")

    def _answer(self, number: int, message: msgspec.Struct, fd: int | None) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.send(message, fd)
            if number not in self._half_closed and not connection.eof:
                self._go_on(connection)

    def _status(self, request: int) -> protocol.Status:
        now, ends_at, pool = time.monotonic(), self._ends_at(), self._registry.pool
        clients = [protocol.ClientStatus(c.rank, c.pid) for c in self._connections.values() if c.rank is not None]
        available = available_nbytes()
        return protocol.Status(
            request=request,
            pid=os.getpid(),
            job=self._place.job,
            uptime_s=now - self._started,
            ends_in_s=None if ends_at == float("inf") else max(0.0, ends_at - now),
            clients=tuple(sorted(clients, key=lambda client: client.rank)),
            saves=self._registry.saves(),
            arenas=pool.status(),
            runs=pool.runs(),
            available_nbytes=max(0, available.nbytes - pool.untouched_nbytes),
            available_by=available.by,
            log=self._place.path("log"),
        )


def _bound(act: Callable[[Connection], None], connection: Connection) -> Callable[[], None]:
    return lambda: act(connection)
