"""What the keeper's threads ask of a store just now, so that a request which never returns is seen, and named."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from ckpt.store.around import AroundStore
from ckpt.store.base import Seen, Sink, Source, Store

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """One that has not been answered yet."""

    what: str  # the store's verb
    where: str  # root and key
    since: float  # time.monotonic()

    @property
    def age_s(self) -> float:
        """How long it has been waited for."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"`{self.what}` of {self.where} has not returned for {self.age_s:.1f} s"


class Requests:
    """By thread: each has one at most."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Request] = {}

    def of(self, thread: threading.Thread | None) -> Request | None:
        """What this thread waits for; None when it does not wait for a store."""
        return None if thread is None or thread.ident is None else self._by_thread.get(thread.ident)

    @contextlib.contextmanager
    def under_way(self, what: str, where: str) -> Iterator[None]:
        """This thread's, while the block runs."""
        thread = threading.get_ident()
        self._by_thread[thread] = Request(what, where, time.monotonic())
        try:
            yield
        finally:
            del self._by_thread[thread]


_VERBS = {
    "get": "read",
    "read_into": "read",
    "open_source": "open",
    "open_sink": "open",
    "size": "stat",
    "exists": "stat",
    "delete_folder": "delete",
}  # as people know them; any other operation has its own name


class WatchedStore(AroundStore):
    """A store each of whose requests stands in ``requests`` while it is under way."""

    def __init__(self, inner: Store, requests: Requests) -> None:
        super().__init__(inner)
        self._requests = requests

    def asking(self, what: str, key: str) -> contextlib.AbstractContextManager[None]:
        """While the block runs, this thread's request is ``what`` of the key."""
        return self._requests.under_way(what, f"{self.url}/{key}" if key else self.url)

    def pass_on(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:  # noqa: ARG002 - any size
        """``call()``, as a request."""
        with self.asking(_VERBS.get(operation, operation), key):
            return call()

    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """The inner store's, watched."""
        return _WatchedSource(super().open_source(key, shared=shared), self, key)

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """The inner store's, watched."""
        return _WatchedSink(super().open_sink(key, nbytes), self, key)


class _WatchedSink(Sink):
    def __init__(self, inner: Sink, store: WatchedStore, key: str) -> None:
        self._inner, self._store, self._key = inner, store, key

    def write(self, view: memoryview | bytes) -> None:
        with self._store.asking("write", self._key):
            self._inner.write(view)

    def close(self) -> None:
        with self._store.asking("close", self._key):
            self._inner.close()

    def abort(self) -> None:
        with self._store.asking("remove", self._key):
            self._inner.abort()


class _WatchedSource(Source):
    def __init__(self, inner: Source, store: WatchedStore, key: str) -> None:
        self._inner, self._store, self._key = inner, store, key

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        with self._store.asking("read", self._key):
            self._inner.read_into(offset, view, seen)

    def close(self) -> None:
        self._inner.close()
