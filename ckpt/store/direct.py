"""What O_DIRECT asks for, how a descriptor is switched to it and back, and the memory that it goes through.

Straight from page-aligned memory to the device a large file is durable in about half the time that the page cache
takes, and evicts nothing that training reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import threading
from pathlib import Path

PAGE_NBYTES = 4096  # offset, address and length must divide by it, on every disk of today
MIN_NBYTES = 1 << 20  # below, the page cache is faster than waiting for the device

OUT_NBYTES = 2 << 20  # what one write takes, where it goes through such memory
BOUNCE_NBYTES = 1 << 20  # what one read asks for; it lies in the processor's cache when it is digested and copied on
_HUGE_NBYTES = 2 << 20
_PYBUF_SIMPLE = 0  # contiguous bytes, read-only memory allowed


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer``; only the address is read."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address(view: memoryview) -> int:
    """The address of a contiguous view's first byte; the view may be read-only."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), _PYBUF_SIMPLE)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def usable_nbytes(view: memoryview, offset: int) -> int:
    """How many of the view's first bytes may go to ``offset`` by O_DIRECT: whole pages, 0 where it does not pay."""
    whole = view.nbytes - view.nbytes % PAGE_NBYTES
    if whole < MIN_NBYTES or offset % PAGE_NBYTES or address(view) % PAGE_NBYTES:
        return 0
    return whole


def switch(file: int, *, on: bool) -> None:
    """Set or clear O_DIRECT on an open descriptor; OSError with EINVAL where the file system has none."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


_memory = threading.local()
_SHARED_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@functools.cache
def shared_pages_are_huge() -> bool:
    """Whether this kernel grants huge pages to memory that processes share, as a keeper's arenas, on request."""
    try:
        setting = Path(_SHARED_PAGES).read_text()
    except OSError:
        return False
    return any(f"[{word}]" in setting for word in ("always", "within_size", "advise", "force"))


def bounce(nbytes: int = BOUNCE_NBYTES) -> memoryview:
    """So much page-aligned memory, 2 MiB at most; this thread's own, given back when the thread ends.

    It is one huge page where the kernel grants it. Into single pages of 4 KiB, which the device must be told of one by
    one, O_DIRECT read five times as slowly (0.7 against 3.5 GB/s on a virtual disk), slower than the page cache. From
    them two threads wrote 0.7 GB/s, with a copy into one huge page each 2.7 GB/s, before the sync; a keeper that writes
    so takes 0.24 s of a processor per GB instead of 0.16 s.
    """
    view: memoryview | None = getattr(_memory, "bounce", None)
    if view is None:
        # Twice the size, of which one aligned huge page is ever touched.
        memory = mmap.mmap(-1, 2 * _HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a kernel, or a Python, without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)
        start = -address(whole) % _HUGE_NBYTES
        view = _memory.bounce = whole[start : start + _HUGE_NBYTES]
    return view[:nbytes]
