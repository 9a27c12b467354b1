"""Chunks into tensors that no read can fill: on a device, strided, or of another dtype."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import torch

from ckpt.format.chunk import CHUNK_NBYTES
from ckpt.plan.boxes import Box
from ckpt.plan.load import ChunkRead, flat_range_boxes
from ckpt.reading.fetch import bounce, slices

RING = 2  # pinned buffers of a thread: one is read into while the other is on its way to the device


class TensorLanding:
    """``dest`` gets the elements of ``box``, which come as ``dtype``. A ``ckpt.reading.fetch.Landing``.

    ``dest`` has the box's shape (as ``as_integers`` gives it: 16-byte elements may have a last axis of 2). Bytes for a
    GPU go through pinned memory, RING chunks for each thread that reads, on the stream that is current where this is
    made; ``wait`` returns when all have arrived.
    """

    def __init__(self, dest: torch.Tensor, box: Box, dtype: torch.dtype) -> None:
        self._dest, self._box, self._dtype = dest, box, dtype
        self._stream = torch.cuda.current_stream(dest.device) if dest.device.type == "cuda" else None

    def room(self, nbytes: int) -> memoryview:
        """This thread's buffer for one chunk."""
        if self._stream is None:
            return bounce(nbytes)
        ring = _pinned()
        ring.rotate()
        return ring[0].room(nbytes)

    def land(self, chunk: ChunkRead, view: memoryview) -> None:
        """Copy a chunk's elements to where they lie in ``dest``, converted where the dtypes differ."""
        elements = torch.frombuffer(view, dtype=torch.uint8).view(self._dtype)
        extra = self._dest.shape[len(self._box.sizes) :]  # the last axis of 2
        with torch.no_grad(), torch.cuda.stream(self._stream):  # both count for this thread only
            for start, source, box in self._copies(chunk):
                found = elements[start * extra.numel() : (start + source.numel) * extra.numel()]
                found = found.view((*source.sizes, *extra))[slices(box.relative_to(source))]
                self._dest[slices(box.relative_to(self._box))].copy_(found, non_blocking=True)
        if self._stream is not None:
            _pinned()[0].leaves_on(self._stream)

    def wait(self) -> None:
        """Return when every copy has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copies(self, chunk: ChunkRead) -> Iterator[tuple[int, Box, Box]]:
        """First element in the chunk, the box whose elements begin there, and what of it is wanted."""
        if chunk.target_offset is None:
            for copy in chunk.copies:
                yield copy.start, copy.source, copy.box
            return
        element_nbytes = chunk.entry.nbytes // chunk.entry.box.numel
        first = chunk.target_offset // element_nbytes
        for place, box in flat_range_boxes(self._box, first, first + chunk.nbytes // element_nbytes):
            yield place - first, box, box


class _Pinned:
    """One chunk of page-locked memory, and what tells that the last copy out of it is done."""

    def __init__(self) -> None:
        self._memory = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, pin_memory=True)
        self._copied: torch.cuda.Event | None = None

    def room(self, nbytes: int) -> memoryview:
        """Its first bytes, as soon as they are free."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory.numpy().data[:nbytes]

    def leaves_on(self, stream: torch.cuda.Stream) -> None:
        """It is free when ``stream`` has done what it was given so far."""
        self._copied = stream.record_event()


_memory = threading.local()


def _pinned() -> deque[_Pinned]:
    """This thread's ring; the one in use is the first."""
    ring: deque[_Pinned] | None = getattr(_memory, "ring", None)
    if ring is None:
        ring = _memory.ring = deque(_Pinned() for _ in range(RING))
    return ring
