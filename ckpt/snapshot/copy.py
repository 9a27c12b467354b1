"""Copying tensors into an arena, bit for bit: any dtype, any strides, CPU or device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import torch

from ckpt.errors import BadInputError
from ckpt.snapshot.arena import as_bytes, pin

# Elements are copied as integers of their size: torch copies those of every shape and stride, and changes no bit.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


PROGRESS_NBYTES = 16 << 20


class Copied(msgspec.Struct, frozen=True):
    """What a copy cost."""

    nbytes: int
    seconds: float


def copy_into(
    arena: memoryview, tensors: Iterable[tuple[torch.Tensor, int]], progress: Callable[[int], None] | None = None
) -> Copied:
    """Copy each tensor's elements, row-major, to its offset in the arena; all of it is there when this returns.

    ``progress`` is called after every 16 MiB or so with how many bytes of the arena, from its start, have got their
    content for good; not at the end, and not for what comes from a device. The offsets must ascend then.

    The tensors are plain local ones (a DTensor's local shard). Strided, expanded and conjugated ones are
    copied by what they show, not by what they store. On a device the copies run on a stream of their own, after
    the work that is queued now. Raises BadInputError for a tensor without bytes (meta, sparse) and one that
    lies outside of the arena, or before one that was copied already.
    """
    started = time.perf_counter()
    target = as_bytes(arena)
    nbytes = end = told = 0
    on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for tensor, offset in tensors:
            source = as_integers(tensor)
            size = source.numel() * source.element_size()
            if offset < 0 or offset + size > target.numel():
                raise BadInputError(f"bytes {offset} to {offset + size} lie outside of an arena of {target.numel()}")
            if progress is not None and offset < end:
                raise BadInputError(f"a tensor for byte {offset} comes after those that end at {end}")
            nbytes += size
            end = offset + size
            if not size:
                continue
            if source.device.type == "cuda":
                on_device.setdefault(source.device, []).append((source, target[offset:end]))
                continue
            done = offset
            for piece in _pieces(source):
                start, done = done, done + piece.numel() * piece.element_size()
                _copy(piece, target[start:done])
                if progress is not None and not on_device and done - told >= PROGRESS_NBYTES:
                    told = done
                    progress(told)
        if on_device:
            pin(arena)
        for device, copies in on_device.items():
            _copy_from_cuda(device, copies)
    return Copied(nbytes, time.perf_counter() - started)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements, row-major, as bytes; without a copy where they lie so already."""
    with torch.no_grad():
        source = as_integers(tensor)
        if source.device.type != "cpu":
            source = source.cpu()
        flat = source.contiguous().reshape(-1).view(torch.uint8)
        return flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size, sharing memory where they can; 16-byte ones get a last axis of 2."""
    if tensor.layout != torch.strided or tensor.is_meta:
        what = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise BadInputError(f"a {what} tensor of shape {tuple(tensor.shape)} has no bytes to copy; make it dense first")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() > 8:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER[tensor.element_size()])


def _pieces(source: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same elements in the same order, in pieces of at most PROGRESS_NBYTES."""
    nbytes = source.numel() * source.element_size()
    if nbytes <= PROGRESS_NBYTES:
        yield source
        return
    if source.is_contiguous():
        source = source.reshape(-1)
    rows = PROGRESS_NBYTES * len(source) // nbytes
    for row in range(0, len(source), max(1, rows)):
        if rows:
            yield source[row : row + rows]
        else:
            yield from _pieces(source[row])


def _copy(source: torch.Tensor, place: torch.Tensor, *, non_blocking: bool = False) -> None:
    """``place`` is as many flat bytes; it need not be aligned to the elements."""
    if place.storage_offset() % source.element_size() == 0:
        place.view(source.dtype).view(source.shape).copy_(source, non_blocking=non_blocking)
    else:
        place.copy_(source.contiguous().reshape(-1).view(torch.uint8), non_blocking=non_blocking)


def _copy_from_cuda(device: torch.device, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All copies of one device, on a side stream behind the current one; asynchronous each if the arena is pinned."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for source, place in copies:
            # What is gathered into one piece first is made and used on this stream only.
            _copy(source if source.is_contiguous() else source.contiguous(), place, non_blocking=True)
    stream.synchronize()
