"""What O_DIRECT asks for, and how a descriptor is switched to it and back.

Straight from page-aligned memory to the device a large file is durable in about half the time that the page cache
takes, and evicts nothing that training reads.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

PAGE_NBYTES = 4096  # offset, address and length must divide by it, on every disk of today
MIN_NBYTES = 1 << 20  # below, the page cache is faster than waiting for the device

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
