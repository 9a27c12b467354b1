"""A local file being read: from the page cache where it lies there, else past it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from ckpt.errors import BadInputError, DamagedError
from ckpt.store import direct
from ckpt.store.base import Seen, Source
from ckpt.store.direct import PAGE_NBYTES
from ckpt.store.oserrors import quantity, store_error
from ckpt.store.page_cache import cached_nbytes

OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a stray FIFO would block its reader for ever

DIRECT_NBYTES = 128 << 10  # below, one buffered read brings as much: it is what the kernel reads ahead
PIECE_NBYTES = 512 << 10  # of a buffered read; it is still in the processor's cache when it has been shown
CACHED_ENOUGH = 7 / 8  # of a range; the holes of what is cached are read at a fraction of the device's speed


class LocalSource(Source):
    """Reads what the page cache holds straight into place, and all else with O_DIRECT through ``direct.bounce``.

    A thread that reads past the page cache keeps its bounce buffer (2 MiB) until it ends. ``file`` is the source's to
    close; ``nbytes`` is the file's size.
    """

    def __init__(self, where: str, file: int, nbytes: int, *, direct_file: int | None = None) -> None:
        self._where, self._file, self._nbytes = where, file, nbytes
        self._direct_file = direct_file  # the same file, opened with O_DIRECT; None: only through the page cache
        self._direct_refused = False

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """Fill ``view`` from the file."""
        if offset < 0 or view.readonly or not view.c_contiguous:
            raise BadInputError(
                f"{self._where}: read_into takes an offset of 0 or more and a writable, contiguous view"
            )
        wanted = view.nbytes
        target = view.cast("B") if wanted else view
        try:
            found = 0
            if wanted and offset < self._nbytes:
                if self._goes_direct(offset, wanted):
                    found = self._read_direct(offset, target, seen)
                # Also what a direct read left: all of it where it was refused, else nothing but past the end.
                found += self._read_cached(offset + found, target[found:], seen)
            if found < wanted or offset > self._nbytes:
                raise DamagedError(
                    f"{self._where}: ends after {quantity(os.fstat(self._file).st_size)}, "
                    f"but bytes {offset:,} to {offset + wanted:,} are expected in it"
                )
        except OSError as error:
            raise store_error(self._where, error, "read") from error

    def close(self) -> None:
        """Close the descriptors."""
        for file in (self._file, self._direct_file):
            if file is not None and file >= 0:
                with contextlib.suppress(OSError):
                    os.close(file)
        self._file, self._direct_file = -1, None

    def _goes_direct(self, offset: int, nbytes: int) -> bool:
        if self._direct_file is None or self._direct_refused or nbytes < DIRECT_NBYTES:
            return False
        cached = cached_nbytes(self._file, offset, nbytes)
        return cached is not None and cached < CACHED_ENOUGH * nbytes

    def _read_direct(self, offset: int, view: memoryview, seen: Seen | None) -> int:
        """Read with O_DIRECT until ``view`` is full, the file ends, or the file system refuses; how many bytes came."""
        assert self._direct_file is not None
        bounce, target, done = direct.bounce(), direct.address(view), 0
        source = direct.address(bounce)
        while done < view.nbytes:
            before = (offset + done) % PAGE_NBYTES  # bytes that come along because reads begin with a page
            pages = -(-(before + view.nbytes - done) // PAGE_NBYTES) * PAGE_NBYTES
            try:
                found = os.preadv(self._direct_file, [bounce[:pages]], offset + done - before)
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
                self._direct_refused = True  # no O_DIRECT here, or it wants other alignment
                break
            came = min(found - before, view.nbytes - done)
            if came <= 0:
                break
            ctypes.memmove(target + done, source + before, came)  # unlike a slice's assignment, without the GIL
            if seen is not None:
                seen(view[done : done + came])
            done += came
        return done

    def _read_cached(self, offset: int, view: memoryview, seen: Seen | None) -> int:
        """Read through the page cache until ``view`` is full or the file ends; how many bytes came."""
        done = 0
        while done < view.nbytes:
            found = os.preadv(self._file, [view[done : done + PIECE_NBYTES]], offset + done)
            if found == 0:
                break
            if seen is not None:
                seen(view[done : done + found])
            done += found
        return done


def open_direct(folder: int, name: str, file: int) -> int | None:
    """The file that ``file`` is, opened once more for O_DIRECT; None where that is refused, or no longer the same."""
    try:
        direct_file = os.open(name, OPEN_FLAGS | os.O_DIRECT, dir_fd=folder)
    except OSError:  # the page cache will do
        return None
    try:
        if os.path.samestat(os.fstat(direct_file), os.fstat(file)):
            return direct_file
    except OSError:
        pass
    os.close(direct_file)
    return None
