"""The store interface: keys to bytes, durable when a call returns, nothing ever renamed.

A key is a ``/``-separated relative path such as ``step-00000300-w7.3/COMMIT`` (``ckpt.store.keys`` says
exactly; any other is a BadInputError). A store that cannot say whether a key exists raises StoreError;
NotFoundError means definitely absent. A folder is no object: under its key nothing can be read.

A new store is a class, and ``class TestMyStore(ckpt.testing.StoreTests)``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ckpt.errors import NotFoundError


class Sink(abc.ABC):
    """One object being written. ``with store.open_sink(...) as sink: sink.write(view)``.

    Leaving the ``with`` block normally makes the object durable and visible; leaving it by an
    exception aborts it and removes what was written. Used by one thread at a time.

    Until ``close`` has returned the object may be visible in part (a file that grows), or not at all:
    readers go by COMMIT. A process that dies before leaves what it wrote, as debris.
    """

    @abc.abstractmethod
    def write(self, view: memoryview | bytes) -> None:
        """Append bytes; the caller's memory is free again when this returns. After an error only ``abort`` helps."""

    @abc.abstractmethod
    def close(self) -> None:
        """Make the object durable (file and folder).

        Raises StoreError, after which the object is not there: also when a ``write`` failed before, and when
        the bytes written are not the ``nbytes`` announced. Once it has returned, further calls do nothing.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Give up; removes what was written, as far as the storage lets it. Never raises.

        Does nothing after ``close`` or ``abort``: it never removes a finished object.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


Seen = Callable[[memoryview], object]  # is shown the pieces of a read, first to last


class Source(abc.ABC):
    """One object being read. ``with store.open_source(key) as source: source.read_into(0, view)``.

    Safe to use from several threads at once; ``close`` comes after the last of them.
    """

    @abc.abstractmethod
    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """Fill ``view`` (writable, contiguous) from byte ``offset`` on.

        ``seen`` is shown the bytes of ``view`` piece by piece, in order, each as soon as it has arrived: it may digest
        what still lies in the processor's cache. A store that gets all at once shows all at once.

        NotFoundError when absent. DamagedError when the object ends before; ``view`` may then be filled in part.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the source holds; a second call does nothing. Never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(abc.ABC):
    """Keys to bytes. Safe to use from several threads and processes at once."""

    url: str  # what open_store would open again, from any process
    in_memory: bool = False  # whether only this process sees what is in it
    lists_at_once: bool = True  # whether ``list`` shows what the keys say; else it may lag behind them

    @abc.abstractmethod
    def get(self, key: str, *, limit_nbytes: int | None = None) -> bytes:
        """The whole object. NotFoundError when absent; StoreError when larger than ``limit_nbytes``."""

    @abc.abstractmethod
    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """A source of the object, for more reads than one.

        NotFoundError when absent: here, or at the latest from ``Source.read_into``. ``shared`` says that other
        processes of this node read the same bytes at about this time: a store that keeps what it has read where
        they find it (the page cache) does so then.
        """

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """``Source.read_into``, once."""
        with self.open_source(key) as source:
            source.read_into(offset, view)

    @abc.abstractmethod
    def size(self, key: str) -> int:
        """The object's size in bytes. NotFoundError when absent."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """The names directly under the folder ``prefix`` (folders without a trailing slash), sorted; [] when absent.

        Folders that became empty may or may not be among them.
        """

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Create-only put, durable when it returns; never a torn object.

        AlreadyExistsError when the key exists: then what is there is durable, too, whoever put it there.
        """

    def sync(self, key: str) -> None:
        """Make durable what is seen under ``key``: whoever put it there may have died before it was.

        NotFoundError when absent. A store that shows nothing before it is durable has nothing more to do.
        """
        self.size(key)

    @abc.abstractmethod
    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """A sink for a new object of ``nbytes`` (when known).

        AlreadyExistsError when the key exists: here, or at the latest from ``Sink.close``.
        """

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object, durably; no error when it is absent."""

    @abc.abstractmethod
    def delete_folder(self, prefix: str) -> None:
        """Remove every object under ``prefix`` and the folder itself; no error when it is absent.

        In no order, and not at once: whoever must not see half of it deletes the object that matters first.
        BadInputError for ``""``, the root.
        """

    def exists(self, key: str) -> bool:
        """Whether the key is there (a definite answer, or StoreError)."""
        try:
            self.size(key)
        except NotFoundError:
            return False
        return True
