"""An arena as torch sees it: bytes to copy into, where each file begins in it, and pinned when there is a GPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

PAGE_NBYTES = 4096

_lock = threading.Lock()
_pinned: dict[int, int] = {}  # address -> nbytes of what is registered with CUDA


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
    """Register an arena with CUDA so that copies into it are asynchronous; whether it is pinned now.

    Once per arena: later calls cost nothing unless it has grown. It ends with the mapping. Copies work
    without it, only slower.
    """
    if not view.nbytes or not torch.cuda.is_available():
        return False
    address = as_bytes(view).data_ptr()
    with _lock:
        known = _pinned.get(address, 0)
        if known >= view.nbytes:
            return True
        if known:
            _unregister(address)
        if int(_cudart().cudaHostRegister(address, view.nbytes, 0)) != 0:
            # The runtime remembers the error and would hand it to the training's next kernel: give it one of ours.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
            return False
        _pinned[address] = view.nbytes
    if not known:
        with contextlib.suppress(TypeError):  # memory that takes no weak reference is not an arena's
            # Called before the mapping's own finalizer, which unmaps: the newest goes first.
            weakref.finalize(view.obj, _forget, address).atexit = False
    return True


def _forget(address: int) -> None:
    with _lock:
        if address in _pinned:
            _unregister(address)


def _unregister(address: int) -> None:
    del _pinned[address]
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
