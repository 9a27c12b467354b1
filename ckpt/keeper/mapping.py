"""A memfd in this process: mapped, kept out of forked children and core dumps, and touched before it is needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable

from ckpt.errors import KeeperError

HUGE_PAGE_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it yet
_SLICE_NBYTES = 16 << 20  # what other threads map meanwhile, and they need to, waits for one slice
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # nor do it, or its stubs, these
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A shared mapping of a memfd, unmapped when its last view is gone.

    Not Python's own ``mmap``: that keeps a descriptor open, which a forked child would inherit and with it
    the memory's life; and it would unmap, in that child, whatever came to lie at its address.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        self.nbytes = nbytes
        self.touched = 0  # so many of its first bytes are in memory
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._address = self._map(fd, nbytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        memory = (ctypes.c_char * nbytes).from_address(self._address)
        weakref.finalize(memory, _unmap, self._libc, self._address, nbytes, os.getpid()).atexit = False
        # Huge pages are refused where the kernel has none for shared memory: then it is small ones.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
            self._libc.madvise(self._address, nbytes, advice)
        view = memoryview(memory).cast("B")
        self.view = view if writable else view.toreadonly()

    def _map(self, fd: int, nbytes: int, prot: int) -> int:
        """Map it where huge pages can be: the kernel does so itself only if all sizes are on, not for theirs alone."""
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        room = whole + HUGE_PAGE_NBYTES
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = self._libc.mmap(None, room, _PROT_NONE, reserve, -1, 0)
        address: int = -(-(start or 0) // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
        if start == _FAILED or self._libc.mmap(address, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
            why = os.strerror(ctypes.get_errno())
            if start != _FAILED:
                self._libc.munmap(start, room)
            raise KeeperError(f"an arena of {nbytes:,} bytes cannot be mapped: {why}")
        if address > start:
            self._libc.munmap(start, address - start)
        self._libc.munmap(address + whole, start + room - address - whole)
        return address

    def touch(self, nbytes: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Have the first ``nbytes`` in memory, by this thread's NUMA node: later copies run at full speed.

        ``stop`` is asked between slices and ends it early. Raises KeeperError when there is not so much memory, where
        a later write would kill the process.
        """
        wanted = min(self.nbytes, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        while self.touched < wanted and not stop():
            part = min(_SLICE_NBYTES, wanted - self.touched)
            if self._libc.madvise(self._address + self.touched, part, _MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                if code == errno.EINVAL:  # an older kernel: the first copy touches it then
                    return
                raise KeeperError(
                    f"no memory for an arena of {nbytes:,} bytes ({os.strerror(code)} after {self.touched:,}); "
                    "save less at once, or give the job more host memory"
                )
            self.touched += part


def _unmap(libc: ctypes.CDLL, address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child nothing of it was ever there
        libc.munmap(address, nbytes)
