"""What the keeper's threads ask of a store just now, so that a request which never returns is seen, and named."""

from __future__ import annotations

import builtins
import contextlib
import threading
import time
from collections.abc import Iterator

import msgspec

from ckpt.store.base import Seen, Sink, Source, Store


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


class WatchedStore(Store):
    """A store each of whose requests stands in ``requests`` while it is under way."""

    def __init__(self, inner: Store, requests: Requests) -> None:
        self.url = inner.url
        self.in_memory, self.lists_at_once = inner.in_memory, inner.lists_at_once
        self._inner = inner
        self._requests = requests

    def __repr__(self) -> str:
        return f"WatchedStore({self._inner!r})"

    def _asking(self, what: str, key: str) -> contextlib.AbstractContextManager[None]:
        return self._requests.under_way(what, f"{self.url}/{key}" if key else self.url)

    def get(self, key: str, *, limit_nbytes: int | None = None) -> bytes:
        """The inner store's."""
        with self._asking("read", key):
            return self._inner.get(key, limit_nbytes=limit_nbytes)

    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """The inner store's, watched."""
        with self._asking("open", key):
            return _WatchedSource(self._inner.open_source(key, shared=shared), self, key)

    def size(self, key: str) -> int:
        """The inner store's."""
        with self._asking("stat", key):
            return self._inner.size(key)

    def list(self, prefix: str = "") -> builtins.list[str]:
        """The inner store's."""
        with self._asking("list", prefix):
            return self._inner.list(prefix)

    def create(self, key: str, data: bytes) -> None:
        """The inner store's."""
        with self._asking("create", key):
            self._inner.create(key, data)

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """The inner store's, watched."""
        with self._asking("open", key):
            return _WatchedSink(self._inner.open_sink(key, nbytes), self, key)

    def delete(self, key: str) -> None:
        """The inner store's."""
        with self._asking("delete", key):
            self._inner.delete(key)

    def delete_folder(self, prefix: str) -> None:
        """The inner store's."""
        with self._asking("delete", prefix):
            self._inner.delete_folder(prefix)


class _WatchedSink(Sink):
    def __init__(self, inner: Sink, store: WatchedStore, key: str) -> None:
        self._inner, self._store, self._key = inner, store, key

    def write(self, view: memoryview | bytes) -> None:
        with self._store._asking("write", self._key):  # noqa: SLF001 - the classes are one thing
            self._inner.write(view)

    def close(self) -> None:
        with self._store._asking("close", self._key):  # noqa: SLF001 - as above
            self._inner.close()

    def abort(self) -> None:
        with self._store._asking("remove", self._key):  # noqa: SLF001 - as above
            self._inner.abort()


class _WatchedSource(Source):
    def __init__(self, inner: Source, store: WatchedStore, key: str) -> None:
        self._inner, self._store, self._key = inner, store, key

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        with self._store._asking("read", self._key):  # noqa: SLF001 - as above
            self._inner.read_into(offset, view, seen)

    def close(self) -> None:
        self._inner.close()
