"""What the machine itself can do with the same bytes: copy, write, read, with nothing in between."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BLOCK_NBYTES = 8 << 20
PAGE_NBYTES = 4096


class Buffer:
    """Page-aligned memory that was touched before, in huge pages where the kernel gives them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES  # O_DIRECT moves whole pages
        self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.tensor.fill_(1)

    def blocks(self) -> list[tuple[int, memoryview]]:
        """``(offset, view)`` of each block."""
        view = memoryview(self.memory)
        return [(at, view[at : at + BLOCK_NBYTES]) for at in range(0, self.nbytes, BLOCK_NBYTES)]


def copy_s(tensors: Sequence[torch.Tensor], buffer: Buffer) -> float:
    """Seconds to copy ``tensors`` (on the CPU, contiguous) one after the other into ``buffer``, by memmove."""
    begin = time.perf_counter()
    at = buffer.tensor.data_ptr()
    for tensor in tensors:
        ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
        at += tensor.nbytes
    return time.perf_counter() - begin


def write_s(path: Path, buffer: Buffer) -> float:
    """Seconds to write ``buffer`` with O_DIRECT into a new file that is durable afterwards."""
    begin = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o644)
    try:
        for at, block in buffer.blocks():
            if os.pwrite(fd, block, at) != len(block):
                raise OSError(f"{path}: short write at {at}")
        os.fsync(fd)
    finally:
        os.close(fd)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return time.perf_counter() - begin


def read_s(path: Path, buffer: Buffer, *, direct: bool, threads: int = 1) -> float:
    """Seconds to read the file into ``buffer``, past the page cache or through it, by one or more threads."""
    begin = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    def read(turn: int) -> None:
        for at, block in buffer.blocks()[turn::threads]:
            if os.preadv(fd, [block], at) != len(block):
                raise OSError(f"{path}: short read at {at}")

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
    finally:
        os.close(fd)
    return time.perf_counter() - begin


def drop_cache(folder: Path) -> None:
    """Make every file under ``folder`` durable and throw its pages out of the page cache."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_cache(folder: Path) -> None:
    """Read every file under ``folder`` once, so that it lies in the page cache."""
    scratch = memoryview(bytearray(BLOCK_NBYTES))
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
