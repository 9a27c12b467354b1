"""Stores that fail, dawdle, stand still or write too little, at the operation and key that a test names."""

from __future__ import annotations

import errno as errno_names
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from ckpt.errors import BadInputError, CkptError, StoreError
from ckpt.store import placing
from ckpt.store.base import Sink, Store
from ckpt.store.oserrors import quantity, store_error
from ckpt.testing.wrapped import Tally, WrappedStore

T = TypeVar("T")

_DOING = {
    **dict.fromkeys(("get", "read_into", "size"), "read"),
    "list": "list",
    **dict.fromkeys(("delete", "delete_folder"), "delete"),
}
_MOVING = {"create", "read_into"}  # and write; a close tells its sink's bytes once more
_POLL_S = 0.005


class FaultyStore(WrappedStore):
    """Raises what an operating system's ``errno`` would become, at some operations.

    * Without ``on_nth`` and ``after_nbytes`` every matching operation fails.
    * ``after_nbytes=N``: a device that fills up. Operations pass until N bytes have been moved by all matching
      ones together; what would exceed them fails, and so does everything after. A ``write`` first writes what fits.
    * ``on_nth=K``: only the K-th matching operation fails, counted from 1; ``after_nbytes`` then counts within it.
    * ``after=True``: the operation is done, and then the error raised, as when a server's answer is lost.
    * ``unless``: a path; while something is there the fault sleeps (nothing fails, nothing is counted).
    * ``chance``: between 0 and 1; only so many of the operations that would fail do, by lot.
    * ``message``: the system's own words in the error, such as ``boom``.

    ``abort`` never fails. ``errno`` is a number or a name; ENOENT gives NotFoundError except while writing,
    EEXIST AlreadyExistsError, any other StoreError, each with the OSError as its cause.
    """

    def __init__(
        self,
        inner: Store,
        *,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
        errno: int | str = errno_names.EIO,
        message: str | None = None,
        on_nth: int | None = None,
        after_nbytes: int | None = None,
        after: bool = False,
        unless: str | os.PathLike[str] | None = None,
        chance: float = 1.0,
    ) -> None:
        super().__init__(inner, match=match, operation=operation, tally=tally)
        self.operations -= {"abort"}
        self._chance = chance
        code = getattr(errno_names, errno, None) if isinstance(errno, str) else errno
        if not isinstance(code, int):
            raise BadInputError(f"unknown errno {errno!r}; expected a name such as ENOSPC, or a number")
        self._errno = code
        self._message = message or os.strerror(code)
        self._on_nth, self._after_nbytes, self._after, self._unless = on_nth, after_nbytes, after, unless

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:
        """Calls, or raises."""
        room = self._room(nbytes if operation in _MOVING else 0)
        if room is None:
            return call()
        if self._after:
            call()
        raise self._error(operation, key, room)

    def around_write(self, sink: Sink, key: str, view: memoryview) -> None:
        """Writes what fits, then raises."""
        room = self._room(view.nbytes)
        sink.write(view if room is None or self._after else view[:room])
        if room is not None:
            raise self._error("write", key, room)

    def _room(self, nbytes: int) -> int | None:
        """Count the operation. None: let it pass; else how many of its bytes still fit before it fails."""
        if (self._unless is not None and os.path.exists(self._unless)) or random.random() >= self._chance:
            return None
        tally, limit = self.tally, self._after_nbytes
        with tally.lock:
            tally.operations += 1
            if self._on_nth is not None:
                return min(limit or 0, nbytes) if tally.operations == self._on_nth else None
            if limit is None:
                return 0
            room = max(0, limit - tally.nbytes)
            tally.nbytes += min(room, nbytes)
            # A full device also refuses to close, or to make, a file without bytes of its own.
            return None if nbytes <= room and (nbytes or room) else room

    def _error(self, operation: str, key: str, room: int) -> CkptError:
        cause = OSError(self._errno, self._message)
        progress = "" if self._after_nbytes is None else f"after {quantity(room)} of this {operation}"
        error = store_error(f"{self.url}/{key}", cause, _DOING.get(operation, "write"), progress)
        error.__cause__ = cause
        return error


class ShortStore(WrappedStore):
    """While a matching operation runs, the system takes at most ``most_nbytes`` of each write that is asked of it.

    As a system may that is short of space, of buffers, or interrupted. For stores of local files: their
    ``pwrite`` is what gets less.
    """

    def __init__(
        self,
        inner: Store,
        *,
        most_nbytes: int,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
    ) -> None:
        super().__init__(inner, match=match, operation=operation, tally=tally)
        if most_nbytes < 1:
            raise BadInputError(f"most_nbytes={most_nbytes}: a write that takes nothing is an error; give 1 or more")
        self._most_nbytes = most_nbytes
        if placing.write_some is not _write_some:
            placing.write_some = _write_some

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:  # noqa: ARG002 - all alike
        """Calls; the writes of this thread are short meanwhile."""
        _short.most_nbytes = self._most_nbytes
        try:
            return call()
        finally:
            del _short.most_nbytes


_short = threading.local()
_write_whole = placing.write_some


def _write_some(file: int, rest: memoryview, offset: int) -> int:
    return _write_whole(file, rest[: getattr(_short, "most_nbytes", None)], offset)


class SlowStore(WrappedStore):
    """Waits ``delay_s`` before each matching operation, and as long as its bytes take at ``bytes_per_s``.

    With ``chance``, between 0 and 1, only before so many of them, by lot.
    """

    def __init__(
        self,
        inner: Store,
        *,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        chance: float = 1.0,
    ) -> None:
        super().__init__(inner, match=match, operation=operation, tally=tally)
        self._delay_s, self._bytes_per_s, self._chance = delay_s, bytes_per_s, chance

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:  # noqa: ARG002 - all wait alike
        """Waits, then calls."""
        if random.random() < self._chance:
            time.sleep(self._delay_s + (nbytes / self._bytes_per_s if self._bytes_per_s else 0.0))
        return call()


class BlockingStore(WrappedStore):
    """Holds each matching operation until the file ``release`` exists; with ``on_nth=K`` only the K-th, counted from 1
    while that file is not there.

    The file ``waiting`` is made when an operation begins to wait, so that a test can wait for that moment. After
    ``timeout_s`` the operation fails with StoreError instead of hanging the test run.
    """

    def __init__(
        self,
        inner: Store,
        *,
        release: str | os.PathLike[str],
        waiting: str | os.PathLike[str] | None = None,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
        timeout_s: float = 60.0,
        on_nth: int | None = None,
    ) -> None:
        super().__init__(inner, match=match, operation=operation, tally=tally)
        self._release, self._waiting, self._timeout_s, self._on_nth = release, waiting, timeout_s, on_nth

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:  # noqa: ARG002 - any bytes wait
        """Says that it waits, waits, then calls."""
        if os.path.exists(self._release):
            return call()
        with self.tally.lock:
            self.tally.operations += 1
            passes = self._on_nth not in {None, self.tally.operations}
        if passes:
            return call()
        if self._waiting is not None:
            os.close(os.open(self._waiting, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        deadline = time.monotonic() + self._timeout_s
        while not os.path.exists(self._release):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self.url}/{key}: {operation} was held for {self._timeout_s} s and {self._release} never came"
                )
            time.sleep(_POLL_S)
        return call()
