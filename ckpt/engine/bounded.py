"""A store that answers in a bounded time, or raises: for what a rank reads while the other ranks wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ckpt.engine.aside import Aside, OverdueError
from ckpt.errors import StoreError
from ckpt.store.around import AroundStore
from ckpt.store.base import Store

Result = TypeVar("Result")

READERS = "ckpt-read"  # threads whose names begin so are watched by whoever waits for them


class BoundedStore(AroundStore):
    """Passes every operation on, and raises StoreError when ``inner`` has not answered one in ``limit_s``.

    The operation is then left behind in a thread of its own; it may still take effect. What sources and sinks do is
    not bounded: their bytes are watched where they are waited for. ``sign`` is called after each operation.
    """

    def __init__(self, inner: Store, limit_s: float, sign: Callable[[], object]) -> None:
        super().__init__(inner)
        self.limit_s = limit_s
        self._sign = sign
        self._local = threading.local()

    def pass_on(self, operation: str, key: str, nbytes: int, call: Callable[[], Result]) -> Result:  # noqa: ARG002 - any size
        """``call()``, or StoreError when it takes too long."""
        if threading.current_thread().name.startswith(READERS):
            return call()
        aside: Aside | None = getattr(self._local, "aside", None)
        if aside is None:
            aside = self._local.aside = Aside("ckpt-store")
        try:
            result = aside.call(call, self.limit_s)
        except OverdueError:
            raise StoreError(
                f"{self.url}/{key}: {operation} has not come to an end in {self.limit_s:g} s: the storage hangs"
            ) from None
        self._sign()
        return result

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """The inner store's: what it reads is watched where it is waited for."""
        self.inner.read_into(key, offset, view)
