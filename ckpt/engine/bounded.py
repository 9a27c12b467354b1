"""A store that answers in a bounded time, or raises: for what a rank reads while the other ranks wait for it."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from typing import TypeVar

from ckpt.engine.aside import Aside, OverdueError
from ckpt.errors import StoreError
from ckpt.store.base import Sink, Source, Store

Result = TypeVar("Result")

READERS = "ckpt-read"  # threads whose names begin so are watched by whoever waits for them


class BoundedStore(Store):
    """Passes every operation on, and raises StoreError when ``inner`` has not answered one in ``limit_s``.

    The operation is then left behind in a thread of its own; it may still take effect. What sources and sinks do is
    not bounded: their bytes are watched where they are waited for. ``sign`` is called after each operation.
    """

    def __init__(self, inner: Store, limit_s: float, sign: Callable[[], object]) -> None:
        self.inner = inner
        self.url = inner.url
        self.in_memory, self.lists_at_once = inner.in_memory, inner.lists_at_once
        self.limit_s = limit_s
        self._sign = sign
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"BoundedStore({self.inner!r})"

    def _bounded(self, operation: str, key: str, act: Callable[[], Result]) -> Result:
        if threading.current_thread().name.startswith(READERS):
            return act()
        aside: Aside | None = getattr(self._local, "aside", None)
        if aside is None:
            aside = self._local.aside = Aside("ckpt-store")
        try:
            result = aside.call(act, self.limit_s)
        except OverdueError:
            raise StoreError(
                f"{self.url}/{key}: {operation} has not come to an end in {self.limit_s:g} s: the storage hangs"
            ) from None
        self._sign()
        return result

    def get(self, key: str, *, limit_nbytes: int | None = None) -> bytes:
        """The inner store's."""
        return self._bounded("get", key, lambda: self.inner.get(key, limit_nbytes=limit_nbytes))

    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """The inner store's."""
        return self._bounded("open_source", key, lambda: self.inner.open_source(key, shared=shared))

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """The inner store's."""
        self.inner.read_into(key, offset, view)

    def size(self, key: str) -> int:
        """The inner store's."""
        return self._bounded("size", key, lambda: self.inner.size(key))

    def list(self, prefix: str = "") -> builtins.list[str]:
        """The inner store's."""
        return self._bounded("list", prefix, lambda: self.inner.list(prefix))

    def create(self, key: str, data: bytes) -> None:
        """The inner store's."""
        self._bounded("create", key, lambda: self.inner.create(key, data))

    def sync(self, key: str) -> None:
        """The inner store's."""
        self._bounded("sync", key, lambda: self.inner.sync(key))

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """The inner store's."""
        return self._bounded("open_sink", key, lambda: self.inner.open_sink(key, nbytes))

    def delete(self, key: str) -> None:
        """The inner store's."""
        self._bounded("delete", key, lambda: self.inner.delete(key))

    def delete_folder(self, prefix: str) -> None:
        """The inner store's."""
        self._bounded("delete_folder", prefix, lambda: self.inner.delete_folder(prefix))

    def exists(self, key: str) -> bool:
        """The inner store's."""
        return self._bounded("exists", key, lambda: self.inner.exists(key))
