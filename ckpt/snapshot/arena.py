"""An arena as torch sees it: bytes to copy into, where each file begins in it, and pinned when there is a GPU."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import msgspec
import torch

from ckpt.snapshot.pinned import RefusedError, register, unregister

PAGE_NBYTES = 4096


class _Seen(msgspec.Struct, frozen=True):
    """An arena that was to be pinned."""

    nbytes: int
    device: int  # in whose context
    pinned: bool  # else the driver has refused it, and is not asked again


_lock = threading.RLock()  # a finalizer may run within
_seen: dict[int, _Seen] = {}  # by address
_noted = False


def place_files(files_nbytes: Sequence[int]) -> tuple[list[int], int]:
    """(offset of each file in the arena, bytes the arena needs): each file begins on a page, for O_DIRECT."""
    offsets, end = [], 0
    for nbytes in files_nbytes:
        offsets.append(end)
        end += -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    return offsets, end


def as_bytes(view: memoryview) -> torch.Tensor:
    """An arena's memory as a flat uint8 tensor, without a copy."""
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


def pin(view: memoryview) -> bool:
    """Page-lock an arena for CUDA, so that copies into it are asynchronous; whether it is now.

    Once per arena: later calls cost nothing unless it has grown. It ends with the mapping. Copies work without it,
    only slower: why it cannot be had is said once, on stderr.
    """
    if not view.nbytes or not _has_device():
        return False
    address = as_bytes(view).data_ptr()
    with _lock:
        known = _seen.get(address)
        if known is not None and known.nbytes >= view.nbytes:
            return known.pinned
        device = torch.cuda.current_device()
        if known is not None:
            _unpin(address)
        try:
            register(address, view.nbytes, device)
        except RefusedError as error:
            _note(str(error))
            _seen[address] = _Seen(view.nbytes, device, pinned=False)
        else:
            _seen[address] = _Seen(view.nbytes, device, pinned=True)
        pinned = _seen[address].pinned
    if known is None:
        with contextlib.suppress(TypeError):  # memory that takes no weak reference is not an arena's
            # Called before the mapping's own finalizer, which unmaps: the newest goes first.
            weakref.finalize(view.obj, _forget, address, os.getpid()).atexit = False
    return pinned


def _has_device() -> bool:
    """Whether something of this process lies on a device; none is woken up for the question."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _forget(address: int, pid: int) -> None:
    if os.getpid() != pid:  # nothing of it was ever in a forked child
        return
    with _lock:
        _unpin(address)


def _unpin(address: int) -> None:
    known = _seen.pop(address)
    if known.pinned:
        with contextlib.suppress(RefusedError):
            unregister(address, known.device)


def _note(why: str) -> None:
    global _noted  # noqa: PLW0603 - once per process
    if not _noted:
        _noted = True
        sys.stderr.write(f"ckpt: snapshots are not page-locked ({why}): copies from the device take longer\n")
