"""A local file that grows while it is written, past the page cache where its memory allows that."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from ckpt.errors import StoreError
from ckpt.store import direct, placing
from ckpt.store.base import Sink
from ckpt.store.oserrors import quantity, store_error


class LocalSink(Sink):
    """A file that grows under its own name, from its first byte on this sink's alone (``O_EXCL``)."""

    def __init__(self, where: str, folder: int, name: str, nbytes: int | None) -> None:
        self._where, self._name, self._announced_nbytes = where, name, nbytes
        self._offset = 0
        self._failed = False
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        self._folder = os.dup(folder)
        self._open = True
        self._direct = False  # whether O_DIRECT is set now
        self._direct_refused = False

    def write(self, view: memoryview | bytes) -> None:
        """Append bytes, past the page cache where their memory is page-aligned and large."""
        if not self._open or self._failed:
            raise StoreError(f"{self._where}: the sink is closed or has failed; nothing more can be written")
        if not memoryview(view).nbytes:
            return
        rest = memoryview(view).cast("B")
        try:
            while rest:
                written = self._write_some(rest)
                self._offset += written
                rest = rest[written:]
        except OSError as error:
            self._failed = True
            raise store_error(self._where, error, "write", f"after {quantity(self._offset)}") from error

    def close(self) -> None:
        """Sync file and folder."""
        if not self._open:
            return
        if self._failed or self._announced_nbytes not in {None, self._offset}:
            self.abort()
            why = "a write failed" if self._failed else f"{quantity(self._announced_nbytes or 0)} were announced"
            raise StoreError(f"{self._where}: {quantity(self._offset)} written and removed again, because {why}")
        try:
            os.fsync(self._file)
            file, self._file = self._file, -1
            os.close(file)  # network file systems report here what they could not write
            placing.sync_folder(self._folder)
        except OSError as error:
            self.abort()
            raise store_error(self._where, error, "write", f"after {quantity(self._offset)}") from error
        os.close(self._folder)
        self._open = False

    def abort(self) -> None:
        """Unlink the file."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            if self._file >= 0:
                os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)
            placing.sync_folder(self._folder)
        with contextlib.suppress(OSError):
            os.close(self._folder)

    def _write_some(self, rest: memoryview) -> int:
        """One write, straight to the device where page-aligned memory meets a page-aligned offset."""
        whole_pages = 0 if self._direct_refused else direct.usable_nbytes(rest, self._offset)
        try:
            if bool(whole_pages) != self._direct:
                direct.switch(self._file, on=not self._direct)
                self._direct = not self._direct
            if not whole_pages:
                return placing.write_some(self._file, rest, self._offset)
            if direct.shared_pages_are_huge():
                return placing.write_some(self._file, rest[:whole_pages], self._offset)
            return self._write_through_huge_page(rest[:whole_pages])
        except OSError as error:
            if not whole_pages or error.errno != errno.EINVAL:
                raise
        self._direct_refused = True  # this file system has no O_DIRECT, or wants other alignment
        return self._write_some(rest)

    def _write_through_huge_page(self, pages: memoryview) -> int:
        """Whole pages to the device, which takes them faster from one huge page than from where they lie."""
        start, written = direct.address(pages), 0
        while written < pages.nbytes:
            piece = direct.bounce(min(direct.OUT_NBYTES, pages.nbytes - written))
            ctypes.memmove(direct.address(piece), start + written, piece.nbytes)  # lets other threads run meanwhile
            taken = placing.write_some(self._file, piece, self._offset + written)
            written += taken
            if taken < piece.nbytes:
                break
        return written
