"""Some bytes of many tensors, cheaply: other ones at each turn, so that in time every byte is among them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ckpt.snapshot.copy import as_integers

WINDOW_NBYTES = 1024  # of whole elements: their sizes divide it
PLACES = 2  # windows of each tensor at each turn


def spans(nbytes: int, turn: int) -> list[tuple[int, int]]:
    """(first byte, end) of what is looked at of so many bytes at a turn; all of them where these are few."""
    if nbytes <= PLACES * WINDOW_NBYTES:
        return [(0, nbytes)] if nbytes else []
    windows = -(-nbytes // WINDOW_NBYTES)
    found = []
    for place in range(PLACES):
        start = (turn + place * windows // PLACES) % windows * WINDOW_NBYTES
        found.append((start, min(start + WINDOW_NBYTES, nbytes)))
    return found


def sample(tensors: Sequence[torch.Tensor], turn: int) -> list[bytes]:
    """Of each tensor, row-major, the bytes in ``spans``. What lies on a device is gathered there and copied at once.

    Behind the work that is queued on the device now, which is waited for. The tensors are as a flattened state has
    them: dense, neither conjugated nor negated by a mere flag.
    """
    found: list[bytes] = []
    elsewhere: dict[torch.device, list[int]] = {}
    at = ctypes.string_at
    known: dict[int, list[tuple[int, int]]] = {}  # many are of one size
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu and tensor.is_contiguous():
            address, nbytes = tensor.data_ptr(), tensor.nbytes
            if nbytes <= PLACES * WINDOW_NBYTES:
                found.append(at(address, nbytes))
                continue
            pieces = known.get(nbytes) or known.setdefault(nbytes, spans(nbytes, turn))
            found.append(b"".join([at(address + start, end - start) for start, end in pieces]))
        else:
            elsewhere.setdefault(tensor.device, []).append(index)
            found.append(b"")
    with torch.no_grad():
        for indices in elsewhere.values():
            gathered = [_gathered(tensors[index], turn) for index in indices]
            together = bytes(torch.cat(gathered).cpu().numpy())
            for index, piece in zip(indices, gathered, strict=True):
                found[index], together = together[: piece.numel()], together[piece.numel() :]
    return found


def _gathered(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """What ``spans`` says of a tensor that is on a device or strided, as bytes where it is."""
    integers = as_integers(tensor)
    size = integers.element_size()
    if integers.is_contiguous():
        flat = integers.reshape(-1)
        pieces = [flat[start // size : end // size] for start, end in spans(tensor.nbytes, turn)]
    else:
        places = [torch.arange(start // size, end // size) for start, end in spans(tensor.nbytes, turn)]
        pieces = [torch.take(integers, place.to(integers.device)) for place in places]
    return torch.cat([piece.view(torch.uint8) for piece in pieces] or [integers.reshape(-1).view(torch.uint8)])
