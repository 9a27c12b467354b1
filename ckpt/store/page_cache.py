"""How much of a file lies in the page cache, by Linux's ``cachestat`` (6.5 and later)."""

from __future__ import annotations

import ctypes
import mmap
import platform

_CACHESTAT = 451 if platform.machine() in {"x86_64", "aarch64"} else None


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Found(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),  # pages
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None)


def cached_nbytes(file: int, offset: int, nbytes: int) -> int | None:
    """How many bytes of the range lie in the page cache, in whole pages.

    None where that cannot be known: an older kernel, a sandbox that forbids the question, and, from Linux 6.14 on,
    a file that this process neither owns nor may write.
    """
    if _CACHESTAT is None:
        return None
    asked, found = _Range(offset, nbytes), _Found()
    refused = _libc.syscall(
        ctypes.c_long(_CACHESTAT), ctypes.c_int(file), ctypes.byref(asked), ctypes.byref(found), ctypes.c_uint(0)
    )
    return None if refused else int(found.cached) * mmap.PAGESIZE
