"""A store around another: the base of every wrapper here. By itself it changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from ckpt.errors import BadInputError
from ckpt.store.around import AroundStore
from ckpt.store.base import Seen, Sink, Source, Store

T = TypeVar("T")

READING = ("get", "read_into", "size", "list")
MUTATING = (
    "create",
    "open_sink",
    "write",
    "close",
    "abort",
    "delete",
    "delete_folder",
)  # write, close, abort: a sink's
_GROUPS = {"*": READING + MUTATING, "reading": READING, "mutating": MUTATING}


class Tally:
    """What a wrapper has counted; all stores that one process opens with the same environment share one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.operations = 0
        self.nbytes = 0
        self.crashed = False


class WrappedStore(AroundStore):
    """Passes every operation on to ``inner``.

    A wrapper overrides ``around``, which is called for the operations it is concerned with: those named by
    ``operation`` (a name, several, ``reading``, ``mutating``, or ``*``) on keys that match the pattern ``match``,
    either the whole key or its last component. ``exists`` counts as ``size``; opening a source is no operation, each
    of its reads is one.
    """

    default_operation: str = "*"

    def __init__(
        self,
        inner: Store,
        *,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
    ) -> None:
        super().__init__(inner)
        self.match = match
        names = self.default_operation if operation is None else operation
        self.operations = frozenset(
            member for name in ([names] if isinstance(names, str) else names) for member in _GROUPS.get(name, (name,))
        )
        unknown = self.operations - set(_GROUPS["*"])
        if unknown:
            raise BadInputError(f"unknown operation {sorted(unknown)}; known: {', '.join([*_GROUPS, *_GROUPS['*']])}")
        self.tally = tally or Tally()

    def concerns(self, operation: str, key: str) -> bool:
        """Whether ``around`` is called for this."""
        return operation in self.operations and (
            fnmatchcase(key, self.match) or fnmatchcase(key.rpartition("/")[2], self.match)
        )

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:  # noqa: ARG002 - for overriders
        """Runs ``call`` and returns its result. ``nbytes`` is what is to be moved, 0 where that is not known before."""
        return call()

    def around_write(self, sink: Sink, key: str, view: memoryview) -> None:
        """The same for one ``Sink.write``, for wrappers that write only half."""
        self.around("write", key, view.nbytes, lambda: sink.write(view))

    def abort(self, sink: Sink, key: str, nbytes: int) -> None:
        """One ``Sink.abort``."""
        self.pass_on("abort", key, nbytes, sink.abort)

    def pass_on(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:
        """``around`` where this wrapper is concerned, else the plain call."""
        return self.around(operation, key, nbytes, call) if self.concerns(operation, key) else call()

    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """The inner store's, wrapped."""
        return WrappedSource(self, self.inner.open_source(key, shared=shared), key)

    def sync(self, key: str) -> None:
        """The inner store's own, at no time matched: it changes nothing that a reader sees."""
        self.inner.sync(key)

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """The inner store's, wrapped."""
        return WrappedSink(self, super().open_sink(key, nbytes), key)

    exists = Store.exists  # by ``size``


class WrappedSource(Source):
    """A source that asks its store's wrapper about each read, as ``read_into``."""

    def __init__(self, store: WrappedStore, inner: Source, key: str) -> None:
        self._store, self._inner, self._key = store, inner, key

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """The inner source's."""
        self._store.pass_on("read_into", self._key, view.nbytes, lambda: self._inner.read_into(offset, view, seen))

    def close(self) -> None:
        """The inner source's."""
        self._inner.close()


class WrappedSink(Sink):
    """A sink that asks its store's wrapper about each operation; ``close`` and ``abort`` tell the bytes written."""

    def __init__(self, store: WrappedStore, inner: Sink, key: str) -> None:
        self._store, self._inner, self._key = store, inner, key
        self._nbytes = 0

    def write(self, view: memoryview | bytes) -> None:
        """The inner sink's."""
        whole = memoryview(view)
        if self._store.concerns("write", self._key):
            self._store.around_write(self._inner, self._key, whole.cast("B") if whole.nbytes else memoryview(b""))
        else:
            self._inner.write(view)
        self._nbytes += whole.nbytes

    def close(self) -> None:
        """The inner sink's; where the wrapper raises instead, the inner one is aborted, as the interface asks."""
        closed = False

        def close() -> None:
            nonlocal closed
            closed = True
            self._inner.close()

        try:
            self._store.pass_on("close", self._key, self._nbytes, close)
        except Exception:
            if not closed:
                self._inner.abort()
            raise

    def abort(self) -> None:
        """The inner sink's."""
        self._store.abort(self._inner, self._key, self._nbytes)
