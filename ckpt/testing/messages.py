"""Every message between a trainer and its keeper, seen as it goes through the methods of ``socket.socket``.

A message is called by the tag in its frame (``begin``, ``staged``, …), see ``ckpt.keeper.protocol``; a stream that
does not begin with that protocol's line is none of ours, and is let be.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

_LINE = b"ckpt-keeper/"
_LENGTH_NBYTES = 4

# ``around(direction, names, proceed, half)``: "send", with what begins now and what will have been sent whole.
AroundSend = Callable[[list[str], Callable[[], int], Callable[[], Any]], int]
Received = Callable[[list[str]], None]


class _Stream:
    """One direction of one connection: bytes in, the names of whole messages out."""

    def __init__(self) -> None:
        self.rest = bytearray()
        self.is_ours: bool | None = None  # None: too early to say
        self._has_line = False

    def feed(self, received: bytes | memoryview) -> list[str]:
        """What is whole now and was not before."""
        if self.is_ours is False:
            return []
        self.rest += received
        if self.is_ours is None:
            self.is_ours = True if self.rest.startswith(_LINE) else None if _LINE.startswith(self.rest) else False
        names = []
        while self.is_ours and (name := self._next()) is not None:
            names.append(name)
        return names

    def peek(self, sent: memoryview) -> list[str]:
        """What ``feed`` would say, of a stream that stands between two messages."""
        if self.rest or self.is_ours is False:
            return []
        twin = _Stream()
        twin.is_ours, twin._has_line = self.is_ours, self._has_line
        return twin.feed(sent)

    def _next(self) -> str | None:
        if not self._has_line:
            end = self.rest.find(b"\n")
            if end < 0:
                return None
            del self.rest[: end + 1]
            self._has_line = True
            return "the version"
        nbytes = int.from_bytes(self.rest[:_LENGTH_NBYTES], "big")
        if len(self.rest) < _LENGTH_NBYTES + nbytes:
            return None
        body = bytes(self.rest[_LENGTH_NBYTES : _LENGTH_NBYTES + nbytes])
        del self.rest[: _LENGTH_NBYTES + nbytes]
        return str(msgspec.msgpack.decode(body)["type"])


def interpose(sending: AroundSend, received: Received) -> None:
    """See every message from now on. ``sending(names, proceed, half)`` is called in place of a call that sends some.

    It returns what ``proceed()`` returns; ``half()`` sends half of it instead. ``received(names)`` is called when a
    message is whole, before the code under test sees it.
    """
    outs: weakref.WeakKeyDictionary[socket.socket, _Stream] = weakref.WeakKeyDictionary()
    ins: weakref.WeakKeyDictionary[socket.socket, _Stream] = weakref.WeakKeyDictionary()
    lock = threading.RLock()  # a signal's handler may send, too
    base: Any = socket.socket.__mro__[1]

    def stream_of(streams: weakref.WeakKeyDictionary[socket.socket, _Stream], sock: socket.socket) -> _Stream:
        with lock:
            return streams.setdefault(sock, _Stream())

    def send_all(sock: socket.socket, content: Any, flags: int = 0) -> None:
        def proceed() -> int:
            base.sendall(sock, view, flags)
            return view.nbytes

        view = memoryview(content).cast("B")
        _sent(sock, view, proceed, lambda: base.sendall(sock, view[: view.nbytes // 2], flags))

    def send(sock: socket.socket, content: Any, flags: int = 0) -> int:
        view = memoryview(content).cast("B")
        half = view[: view.nbytes // 2]
        return _sent(sock, view, lambda: base.send(sock, view, flags), lambda: base.send(sock, half, flags))

    def send_message(sock: socket.socket, buffers: Any, *arguments: Any) -> int:
        view = memoryview(b"".join(buffers))
        half = view[: view.nbytes // 2]
        return _sent(
            sock, view, lambda: base.sendmsg(sock, [view], *arguments), lambda: base.sendmsg(sock, [half], *arguments)
        )

    def _sent(sock: socket.socket, view: memoryview, proceed: Callable[[], int], half: Callable[[], Any]) -> int:
        if sock.family != socket.AF_UNIX:
            return proceed()
        stream = stream_of(outs, sock)
        names = stream.peek(view)
        nbytes = sending(names, proceed, half) if names else proceed()
        stream.feed(view[:nbytes])
        return nbytes

    def receive(sock: socket.socket, *arguments: Any) -> bytes:
        content: bytes = base.recv(sock, *arguments)
        _came(sock, content)
        return content

    def receive_message(sock: socket.socket, *arguments: Any) -> Any:
        found = base.recvmsg(sock, *arguments)
        _came(sock, found[0])
        return found

    def _came(sock: socket.socket, content: bytes) -> None:
        if sock.family == socket.AF_UNIX and (names := stream_of(ins, sock).feed(content)):
            received(names)

    for name, function in {
        "sendall": send_all, "send": send, "sendmsg": send_message, "recv": receive, "recvmsg": receive_message,
    }.items():  # fmt: skip
        setattr(socket.socket, name, function)
