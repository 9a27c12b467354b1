"""A cap on the bytes a second that a run's saves write, so that they leave the storage to the training's own reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckpt.store.base import Sink

_MOST_NBYTES, _LEAST_NBYTES = 8 << 20, 64 << 10  # of a piece; a multiple of the least, which keeps pages aligned
_PIECE_S = 0.25  # what is written at once takes no longer under the cap, so that the storage sees no bursts

Rest = Callable[[float], None]  # for so many seconds, or a moment less; may raise to stop


class Pace:
    """What one run's saves may write on this node: all of its writing threads draw on it, each with its own save's cap.

    What was written is owed, in bytes, and paid off with time; whoever wants to write waits until nothing is owed. So
    a save that ends early leaves no debt but for what it has written, and the next one pays that at its own cap.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed_nbytes = 0.0
        self._at = time.monotonic()

    def wait_s(self, nbytes: int, mbps: float) -> float:
        """0.0: ``nbytes`` may be written now, and are owed from now on. Else: ask again after so many seconds."""
        with self._lock:
            now, bytes_per_s = time.monotonic(), mbps * 1e6
            self._owed_nbytes = max(0.0, self._owed_nbytes - (now - self._at) * bytes_per_s)
            self._at = now
            if self._owed_nbytes:
                return self._owed_nbytes / bytes_per_s
            self._owed_nbytes = float(nbytes)
            return 0.0


class PacedSink(Sink):
    """Hands on what it is given in pieces, each when its time has come; what was page-aligned stays so."""

    def __init__(self, inner: Sink, pace: Pace, mbps: float, rest: Rest) -> None:
        self._inner, self._pace, self._mbps, self._rest = inner, pace, mbps, rest
        piece_nbytes = int(min(_MOST_NBYTES, mbps * 1e6 * _PIECE_S))
        self._piece_nbytes = max(_LEAST_NBYTES, piece_nbytes - piece_nbytes % _LEAST_NBYTES)

    def write(self, view: memoryview | bytes) -> None:
        """Rest and write, piece by piece; what ``rest`` raises goes through."""
        whole = memoryview(view).cast("B") if len(view) else memoryview(b"")
        for start in range(0, len(whole), self._piece_nbytes):
            piece = whole[start : start + self._piece_nbytes]
            while wait_s := self._pace.wait_s(len(piece), self._mbps):
                self._rest(wait_s)
            self._inner.write(piece)

    def close(self) -> None:
        """The inner sink's."""
        self._inner.close()

    def abort(self) -> None:
        """The inner sink's."""
        self._inner.abort()
