"""An object written through a file of fsspec: there when its file was closed, and only then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.errors import CkptError, StoreError
from ckpt.store.base import Sink
from ckpt.store.oserrors import quantity

if TYPE_CHECKING:
    from ckpt.store.fsspec import FsspecStore


class OpenFile(Protocol):
    """What is asked of a file that is being written. ``discard``, ``flush`` and ``fileno`` may be missing."""

    def write(self, data: memoryview | bytes, /) -> Any:
        """Takes bytes; how many, or None for all."""

    def close(self) -> Any:
        """Ends the object."""


class Held:
    """Bytes that become an object when they are all there: for a file system that would show a file as it grows."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put, self._data = put, bytearray()

    def write(self, data: memoryview | bytes, /) -> int:
        """Keep the bytes."""
        self._data += data
        return len(data)

    def close(self) -> None:
        """Make the object."""
        self._put(bytes(self._data))


class FsspecSink(Sink):
    """Writes through ``file``, which is its own. ``grows``: the object is seen already, and grows while it is written.

    Else it comes to be when the file is closed: until then giving up leaves nothing, and a key that was taken
    meanwhile is noticed then. ``synced``: a local file, whose bytes are to be on the disk.
    """

    def __init__(
        self,
        store: FsspecStore,
        key: str,
        nbytes: int | None,
        file: OpenFile,
        *,
        grows: bool,
        synced: bool = False,
    ) -> None:
        self._store, self._key, self._announced_nbytes, self._file = store, key, nbytes, file
        self._grows, self._synced = grows, synced
        self._offset = 0
        self._failed = False
        self._open = True
        self._ours = grows  # whether what lies under the key, if anything, was put there by this sink

    def write(self, view: memoryview | bytes) -> None:
        """Append bytes."""
        if not self._open or self._failed:
            raise StoreError(
                f"{self._store.where(self._key)}: the sink is closed or has failed; nothing more can be written"
            )
        try:
            self._offset += _write(self._file, view)
        except Exception as error:
            self._failed = True
            raise self._error(error) from error

    def close(self) -> None:
        """Close the file, then look whether the object is there and has its size."""
        if not self._open:
            return
        if self._failed or self._announced_nbytes not in {None, self._offset}:
            self.abort()
            why = "a write failed" if self._failed else f"{quantity(self._announced_nbytes or 0)} were announced"
            where = self._store.where(self._key)
            raise StoreError(f"{where}: {quantity(self._offset)} written and removed again, because {why}")
        try:
            self._close_file()
            self._store.check_size(self._key, self._offset)
        except BaseException as error:
            self.abort()
            if isinstance(error, CkptError) or not isinstance(error, Exception):
                raise
            raise self._error(error) from error
        self._open = False

    def abort(self) -> None:
        """Have the file forget its bytes, and remove what of them is there."""
        if not self._open:
            return
        self._open = False
        give_up(self._file, grows=self._grows)
        if self._ours:
            with contextlib.suppress(CkptError):
                self._store.delete(self._key)

    def _close_file(self) -> None:
        with self._store.lock(self._key):
            if not self._grows and self._store.look(self._key) is not None:
                raise self._store.taken(self._key)
            if self._synced:
                sync(self._file)
            self._ours = True
            try:
                self._file.close()
            except FileExistsError:
                self._ours = False
                raise

    def _error(self, error: Exception) -> CkptError:
        return self._store.error(self._key, error, "write", f"after {quantity(self._offset)}")


def write_all(file: OpenFile, data: bytes, *, grows: Callable[[], bool], synced: bool = False) -> None:
    """Write a whole object and close its file. ``grows`` says, after an error, whether the object is seen already."""
    try:
        _write(file, data)
        if synced:
            sync(file)
    except BaseException:
        give_up(file, grows=grows())
        raise
    file.close()


def give_up(file: Any, *, grows: bool) -> None:
    """Have a file forget what it was given; it never becomes an object, not even when its memory is taken back.

    One that ``grows`` is seen already: it is closed, and its owner removes it.
    """
    with contextlib.suppress(Exception):
        if grows:
            file.close()
        else:
            file.discard()
    for name, value in (("closed", True), ("close", lambda: None)):
        with contextlib.suppress(Exception):
            setattr(file, name, value)


def sync(file: Any) -> None:
    """Have a local file's bytes on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _write(file: OpenFile, view: memoryview | bytes) -> int:
    """Write until the file has all; how much that was."""
    nbytes = memoryview(view).nbytes
    rest = memoryview(view).cast("B") if nbytes else memoryview(b"")
    while rest:
        taken = file.write(rest)
        if taken is None:
            break
        if taken <= 0:
            raise OSError("the file took no bytes")
        rest = rest[taken:]
    return nbytes
