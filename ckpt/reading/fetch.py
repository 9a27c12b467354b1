"""One chunk to read and where it goes: into place, or from a buffer, element by element. No torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ckpt.format.chunk import CHUNK_NBYTES
from ckpt.format.part import DataFile
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box
from ckpt.plan.load import ChunkRead, Copy


class Landing(Protocol):
    """Where chunks go that no read can put into place: memory of a device, strided, or of another dtype."""

    def room(self, nbytes: int) -> memoryview:
        """Memory for one chunk, this thread's until it has called ``land``."""

    def land(self, chunk: ChunkRead, view: memoryview) -> None:
        """Copy the elements of a verified chunk, whose bytes are ``view``, to where they go."""


class Fetch(NamedTuple):
    """One chunk to read for a target: ``into`` are the bytes of all of ``box``, or what takes the chunk there."""

    file: DataFile
    chunk: ChunkRead
    box: Box
    into: memoryview | Landing
    shared: bool = False  # other ranks of this node read it too

    def place(self) -> memoryview | None:
        """The chunk's own place in the target, where its bytes lie there as they are stored."""
        start = self.chunk.target_offset
        if start is None or not isinstance(self.into, memoryview):
            return None
        return self.into[start : start + self.chunk.nbytes]

    def land(self, view: memoryview) -> None:
        """Copy the chunk's elements, whose bytes are ``view``, to where they go."""
        if isinstance(self.into, memoryview):
            scatter(view, self.chunk.copies, self.into, self.box, DTYPE_NBYTES[self.chunk.entry.dtype])
        else:
            self.into.land(self.chunk, view)


_memory = threading.local()


def bounce(nbytes: int) -> memoryview:
    """This thread's buffer, used until its next call."""
    buffer: bytearray = getattr(_memory, "buffer", bytearray())
    if len(buffer) < nbytes:
        buffer = _memory.buffer = bytearray(max(nbytes, min(CHUNK_NBYTES, 2 * len(buffer))))
    return memoryview(buffer)[:nbytes]


def scatter(view: memoryview, copies: Sequence[Copy], into: memoryview, box: Box, itemsize: int) -> None:
    """Copy elements of a chunk (whose bytes are ``view``) to where they lie in ``box``, whose bytes are ``into``."""
    import numpy as np

    # Elements are copied bit for bit: as unsigned numbers where numpy has some of their size.
    dtype: np.dtype[Any] = np.dtype(f"u{itemsize}" if itemsize in {1, 2, 4, 8} else f"V{itemsize}")
    source, target = np.frombuffer(view, dtype), np.frombuffer(into, dtype).reshape(box.sizes)
    for copy in copies:
        elements = source[copy.start : copy.start + copy.source.numel].reshape(copy.source.sizes)
        target[slices(copy.box.relative_to(box))] = elements[slices(copy.box.relative_to(copy.source))]


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box in an array whose corner is the coordinates' origin."""
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
