"""Copying tensors into an arena, bit for bit: any dtype, any strides, CPU or device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from ckpt.errors import BadInputError
from ckpt.snapshot.arena import as_bytes, pin

_stream: Callable[[int, int, int], None] | None  # to, from, nbytes
try:
    from ckpt.snapshot._streaming import copy as _stream
except ImportError:  # built without a C compiler, or for another processor
    _stream = None

# Elements are copied as integers of their size: torch copies those of every shape and stride, and changes no bit.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


PROGRESS_NBYTES = 16 << 20
STREAM_MIN_NBYTES = 256 << 10  # what is smaller stays in the cache, where the keeper's digest finds it


class Copied(msgspec.Struct, frozen=True):
    """What a copy cost."""

    nbytes: int
    seconds: float


def copy_into(
    arena: memoryview,
    tensors: Iterable[tuple[torch.Tensor, int]],
    progress: Callable[[int], None] | None = None,
    *,
    after: Mapping[torch.device, torch.cuda.Event] | None = None,
    queued: Callable[[list[tuple[torch.device, torch.cuda.Event]]], None] | None = None,
) -> Copied:
    """Copy each tensor's elements, row-major, to its offset in the arena; all of it is there when this returns.

    ``progress`` is called after every 16 MiB or so with how many bytes of the arena, from its start, have got their
    content for good; not at the end, and not for what comes from a device. The offsets must ascend then.

    The tensors are plain local ones (a DTensor's local shard). Strided, expanded and conjugated ones are
    copied by what they show, not by what they store. On a device the copies run on a stream of their own, behind
    the event in ``after``, else behind the work that is queued now; ``queued`` is called when all of them are queued
    and what is on the host is copied, with an event per device that follows them.

    Raises BadInputError for a tensor without bytes (meta, sparse) and one that lies outside of the arena, or before
    one that was copied already.
    """
    started = time.perf_counter()
    target = as_bytes(arena)
    base, limit = target.data_ptr(), target.numel()
    nbytes = end = told = 0
    on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for tensor, offset in tensors:
            plain = _is_plain(tensor)
            source = tensor if plain else as_integers(tensor)
            size = source.nbytes
            if offset < 0 or offset + size > limit:
                raise BadInputError(f"bytes {offset} to {offset + size} lie outside of an arena of {limit}")
            if progress is not None and offset < end:
                raise BadInputError(f"a tensor for byte {offset} comes after those that end at {end}")
            nbytes += size
            end = offset + size
            if not size:
                continue
            if plain and size < STREAM_MIN_NBYTES and progress is None:
                ctypes.memmove(base + offset, source.data_ptr(), size)
                continue
            if source.device.type == "cuda":
                on_device.setdefault(source.device, []).append((source, target[offset:end]))
                continue
            may_tell = progress is not None and not on_device
            done = offset
            for step in _copied(source, base + offset) if plain else _copied_strided(source, target[offset:end]):
                done += step
                if may_tell and done - told >= PROGRESS_NBYTES:
                    told = done
                    progress(told)  # type: ignore[misc] # that is what may_tell says
        if on_device:
            pin(arena)
        ends = [
            (device, _copy_from_cuda(device, copies, (after or {}).get(device))) for device, copies in on_device.items()
        ]
        if queued is not None:
            queued(ends)
        for _, event in ends:
            event.synchronize()
    return Copied(nbytes, time.perf_counter() - started)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor lie in host memory as they are to be copied."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _copied(source: torch.Tensor, place: int) -> Iterator[int]:
    """Copy contiguous host memory to an address, at most PROGRESS_NBYTES at a time; how many bytes each was."""
    start, nbytes = source.data_ptr(), source.nbytes
    for offset in range(0, nbytes, PROGRESS_NBYTES):
        size = min(PROGRESS_NBYTES, nbytes - offset)
        if _stream is not None and size >= STREAM_MIN_NBYTES:
            _stream(place + offset, start + offset, size)
        else:
            ctypes.memmove(place + offset, start + offset, size)
        yield size


def _copied_strided(source: torch.Tensor, place: torch.Tensor) -> Iterator[int]:
    """The same for whatever torch can copy, given as integers."""
    done = 0
    for piece in _pieces(source):
        size = piece.nbytes
        _copy(piece, place[done : done + size])
        done += size
        yield size


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements, row-major, as bytes; without a copy where they lie so already."""
    with torch.no_grad():
        source = as_integers(tensor)
        if source.device.type != "cpu":
            source = source.cpu()
        source = source.contiguous()
        if not source.nbytes:
            return memoryview(b"")
        memory = (ctypes.c_ubyte * source.nbytes).from_address(source.data_ptr())
        memory.owner = source  # type: ignore[attr-defined] # not numpy(), after which a tensor cannot be resized
        return memoryview(memory).cast("B")


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


def _copy_from_cuda(
    device: torch.device, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None
) -> torch.cuda.Event:
    """All copies of one device, on a side stream behind ``after``; asynchronous each if the arena is pinned."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if after is None:
        stream.wait_stream(torch.cuda.current_stream(device))
    else:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        for source, place in copies:
            source.record_stream(stream)  # freed by the caller meanwhile, its memory is not used again too soon
            # What is gathered into one piece first is made and used on this stream only.
            _copy(source if source.is_contiguous() else source.contiguous(), place, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
