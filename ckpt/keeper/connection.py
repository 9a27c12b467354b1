"""One client's connection, as the keeper sees it: the handshake, frames in, frames and descriptors out."""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import time
from collections import deque

import msgspec

from ckpt.errors import KeeperError
from ckpt.keeper import protocol
from ckpt.keeper.start import peer

_SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not name it yet
_READ_NBYTES = 1 << 20
_FRAMES_UNREAD = 1000  # that a client may leave to be sent; it is shown out then
_READS_AT_ONCE = 16  # more than a socket holds, so that nothing of a client that died is left


class Connection:
    """Never blocks: the keeper's main thread calls ``receive`` when the socket is readable, ``flush`` when writable."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.number = number
        self.socket = sock
        self.opened = time.monotonic()
        self.pid, self.uid = peer(sock)
        self.pidfd = _pidfd(sock, self.pid)
        self.welcome = False  # whether the client has proved itself
        self.rank: int | None = None
        self.layouts: dict[str, bytes] = {}  # those of its last task
        self.known = False  # whether the keeper has taken note of its rank
        self.closing = False  # close once everything is sent
        self.eof = False
        self._frames = protocol.FrameBuffer()
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._nonces: tuple[bytes, bytes] | None = None
        self._greeted = False

    def receive(self, secret: bytes, job: str) -> list[protocol.FromClient]:
        """What the client has sent, the handshake aside. Raises KeeperError for anything it must not send."""
        messages: list[protocol.FromClient] = []
        # A client that never stops sending must not keep the keeper from the others: what is left wakes it again.
        for _ in range(_READS_AT_ONCE):
            if self.eof:
                break
            try:
                received = self.socket.recv(_READ_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self.eof = not received
            self._frames.feed(received)
            if not self._greeted:
                line = self._frames.line()
                if line is None:
                    continue
                self._greeted = True
                self._queue(protocol.PREAMBLE)
                if line != protocol.PREAMBLE:
                    self.closing = True  # our own line tells the client which version is wanted
                    return messages
            while (body := self._frames.frame()) is not None:
                message = protocol.message_of(body, protocol.from_client)
                if self.welcome:
                    messages.append(message)
                else:
                    self._shake_hands(message, secret, job)
        return messages

    def _shake_hands(self, message: protocol.FromClient, secret: bytes, job: str) -> None:
        if isinstance(message, protocol.Hello) and self._nonces is None:
            nonce = secrets.token_bytes(protocol.NONCE_NBYTES)
            self._nonces = (message.nonce, nonce)
            self.send(protocol.Challenge(nonce, protocol.prove(secret, "keeper", *self._nonces)))
        elif isinstance(message, protocol.Answer) and self._nonces is not None:
            if not protocol.same(message.proof, protocol.prove(secret, "client", *self._nonces)):
                raise KeeperError(f"process {self.pid} does not know this keeper's secret")
            self.welcome, self.rank = True, message.rank
            self._frames.limit_nbytes = protocol.FRAME_LIMIT_NBYTES
            self.send(protocol.Welcome(os.getpid(), job))
        else:
            raise KeeperError(f"process {self.pid} sent {type(message).__name__} before it had proved itself")

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Queue a frame, and a descriptor to go with it."""
        self._queue(protocol.pack(message), fd)

    def _queue(self, raw: bytes, fd: int | None = None) -> None:
        self._out.append((memoryview(raw), fd))
        self.flush()
        if len(self._out) > _FRAMES_UNREAD:  # it asks and asks, and reads no answer
            self._out.clear()
            self.closing = True

    def flush(self) -> bool:
        """Send what can be sent; whether nothing is left."""
        while self._out:
            rest, fd = self._out[0]
            beside = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            try:
                sent = self.socket.sendmsg([rest], beside)
            except BlockingIOError:
                return False
            except OSError:  # the client is gone; its end is handled where it is seen
                self._out.clear()
                break
            if sent == len(rest):
                self._out.popleft()
            else:
                self._out[0] = (rest[sent:], None)
        return True

    def close(self) -> None:
        """Close the socket and the descriptor that watches the client."""
        self.socket.close()
        if self.pidfd is not None:
            with contextlib.suppress(OSError):
                os.close(self.pidfd)
            self.pidfd = None


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """A descriptor that becomes readable when the client dies; None where the client cannot be seen from here."""
    try:
        return array.array("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0]
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None
