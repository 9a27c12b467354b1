"""A store around another: the base of those that bound, watch or disturb what is asked of one."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import TypeVar

from ckpt.store.base import Sink, Source, Store

T = TypeVar("T")


class AroundStore(Store):
    """Passes every operation of the interface on to ``inner``, through ``pass_on``; by itself it changes nothing.

    What sources and sinks do is theirs: who is concerned with that wraps them.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.in_memory, self.lists_at_once = inner.in_memory, inner.lists_at_once

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def pass_on(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:  # noqa: ARG002 - for overriders
        """Runs ``call`` and returns its result. ``nbytes`` is what is to be moved, 0 where that is not known before."""
        return call()

    def get(self, key: str, *, limit_nbytes: int | None = None) -> bytes:
        """The inner store's."""
        return self.pass_on("get", key, 0, lambda: self.inner.get(key, limit_nbytes=limit_nbytes))

    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """The inner store's."""
        return self.pass_on("open_source", key, 0, lambda: self.inner.open_source(key, shared=shared))

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """The inner store's."""
        self.pass_on("read_into", key, view.nbytes, lambda: self.inner.read_into(key, offset, view))

    def size(self, key: str) -> int:
        """The inner store's."""
        return self.pass_on("size", key, 0, lambda: self.inner.size(key))

    def list(self, prefix: str = "") -> builtins.list[str]:
        """The inner store's."""
        return self.pass_on("list", prefix, 0, lambda: self.inner.list(prefix))

    def create(self, key: str, data: bytes) -> None:
        """The inner store's."""
        self.pass_on("create", key, len(data), lambda: self.inner.create(key, data))

    def sync(self, key: str) -> None:
        """The inner store's."""
        self.pass_on("sync", key, 0, lambda: self.inner.sync(key))

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """The inner store's."""
        return self.pass_on("open_sink", key, 0, lambda: self.inner.open_sink(key, nbytes))

    def delete(self, key: str) -> None:
        """The inner store's."""
        self.pass_on("delete", key, 0, lambda: self.inner.delete(key))

    def delete_folder(self, prefix: str) -> None:
        """The inner store's."""
        self.pass_on("delete_folder", prefix, 0, lambda: self.inner.delete_folder(prefix))

    def exists(self, key: str) -> bool:
        """The inner store's."""
        return self.pass_on("exists", key, 0, lambda: self.inner.exists(key))
