"""A keeper's memory in the trainer: mapped, kept out of forked children, and touched before it is needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from ckpt.errors import KeeperError

HUGE_PAGE_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it yet
_SLICE_NBYTES = 16 << 20  # what other threads map meanwhile, and they need to, waits for one slice
_PROT = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A shared mapping of a memfd, unmapped when its last view is gone.

    Not Python's own ``mmap``: that keeps a descriptor open, which a forked child would inherit and with it
    the memory's life; and it would unmap, in that child, whatever came to lie at its address.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._touched = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._address: int = self._libc.mmap(None, nbytes, _PROT, mmap.MAP_SHARED, fd, 0)
        if self._address == _FAILED:
            raise KeeperError(f"an arena of {nbytes:,} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
        memory = (ctypes.c_char * nbytes).from_address(self._address)
        weakref.finalize(memory, _unmap, self._libc, self._address, nbytes, os.getpid()).atexit = False
        self._libc.madvise(self._address, nbytes, mmap.MADV_DONTFORK)
        self._libc.madvise(self._address, nbytes, mmap.MADV_HUGEPAGE)  # refused where there are none: then not
        self.view = memoryview(memory).cast("B")

    def touch(self, nbytes: int) -> None:
        """Have the first ``nbytes`` in memory, by this thread's NUMA node: later copies run at full speed.

        Raises KeeperError when there is not so much memory, where a later write would kill the process.
        """
        wanted = min(self.nbytes, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        while self._touched < wanted:
            part = min(_SLICE_NBYTES, wanted - self._touched)
            if self._libc.madvise(self._address + self._touched, part, _MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                if code == errno.EINVAL:  # an older kernel: the first copy touches it then
                    return
                raise KeeperError(
                    f"no memory for an arena of {nbytes:,} bytes ({os.strerror(code)} after {self._touched:,}); "
                    "save less at once, or give the job more host memory"
                )
            self._touched += part


def _unmap(libc: ctypes.CDLL, address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child nothing of it was ever there
        libc.munmap(address, nbytes)
