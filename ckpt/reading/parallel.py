"""Carrying out a load's reads: many chunks at a time, small neighbours together, each file opened once."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpt.errors import StoreError
from ckpt.format.chunk import RAW
from ckpt.reading.fetch import Fetch
from ckpt.reading.step import StepReader
from ckpt.store.base import Seen, Source

# Two wait for the storage, so that it never waits, while the third digests and copies. A cold load of 1.5 GB by two
# ranks, of which the raw read takes 0.37 s: 0.68 s with one thread, 0.41 with two, 0.38 with three, 0.39 with four.
THREADS = 3
SMALL_NBYTES = 256 << 10  # a chunk that is read together with its neighbours
GAP_NBYTES = 64 << 10  # bytes between two of them that are read for nothing
TOGETHER_NBYTES = 2 << 20  # so much memory of its own each thread that reads has for them
PROGRESS_TIMEOUT_S = 120.0
LOOK_S = 1.0


def fetch_all(
    reader: StepReader,
    fetches: Iterable[Fetch],
    *,
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
    sign: Callable[[], object] = lambda: None,
    owners: object = None,
) -> int:
    """Carry out ``fetches``, in whatever order is quick; the bytes of tensors that came.

    The first error is raised when every read that had begun has ended; the targets are spoiled then. StoreError,
    naming files, when no byte has come for ``progress_timeout_s``: the reads are left behind, and may fill the targets
    later, for which ``owners`` keep the memory. As long as one may, nothing more is read in this process.
    ``sign`` is called every second in which bytes come.
    """
    _refuse_beside_a_hung_read()
    work = list(fetches)
    reading = _Reading(reader, list(together(work)), owners)
    reading.watch(progress_timeout_s, sign)
    for index in sorted(reading.errors):  # in the order of the files, so that the message does not depend on chance
        raise reading.errors[index]
    return sum(fetch.chunk.nbytes for fetch in work)


class _Reading:
    """Reads that a few threads carry out, and how they get on."""

    def __init__(self, reader: StepReader, groups: Sequence[Sequence[Fetch]], owners: object) -> None:
        self.errors: dict[int, BaseException] = {}
        self._reader, self._owners = reader, owners
        self._files = _Files(reader, groups, self._moved)
        self._changed = threading.Condition()  # guards all below but the time of the last byte
        self._left = deque(enumerate(groups))
        self._under_way: dict[int, Sequence[Fetch]] = {}
        self._stop = False
        self._moved_at = time.monotonic()
        self._running = min(THREADS, len(groups))
        for number in range(self._running):
            threading.Thread(target=self._work, name=f"ckpt-read-{number}", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether a thread may still touch the targets."""
        return self._running > 0

    def watch(self, progress_timeout_s: float, sign: Callable[[], object]) -> None:
        """Wait for the end. Raises StoreError when none is to be expected."""
        signed_at = self._moved_at
        try:
            while not self._wait(min(LOOK_S, progress_timeout_s)):
                if self._moved_at > signed_at:
                    signed_at = self._moved_at
                    sign()
                self._raise_if_still(progress_timeout_s)
        except BaseException:
            with self._changed:
                self._stop = True
            if not self._wait(0.0):
                _hung.append(self)
            raise

    def _raise_if_still(self, limit_s: float) -> None:
        if time.monotonic() - self._moved_at > limit_s:
            raise StoreError(f"{self.where()}: no byte has come for {limit_s:g} s: the storage hangs")

    def where(self) -> str:
        """The files that are being read."""
        with self._changed:
            names = sorted({group[0].file.name for group in self._under_way.values()})
        return ", ".join(map(self._reader.where, names))

    def _wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _moved(self, _piece: object = None) -> None:
        self._moved_at = time.monotonic()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._stop or self.errors or not self._left:
                    break
                index, group = self._left.popleft()
                self._under_way[index] = group
            error: BaseException | None = None
            try:
                self._files.fetch(group)
            except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits
                error = failure
            self._moved()
            with self._changed:
                del self._under_way[index]
                if error is not None:
                    self.errors[index] = error
        with self._changed:
            if self._running == 1:
                self._files.close()  # after an error some are still open
            self._running -= 1
            self._changed.notify_all()


_hung: list[_Reading] = []  # reads that were left behind, while they may still fill their targets


def _refuse_beside_a_hung_read() -> None:
    _hung[:] = [reading for reading in _hung if reading.running]
    if _hung:
        raise StoreError(
            f"{_hung[0].where()}: an earlier read hangs in this process, and may still write to the memory that it was "
            "for; start the process anew"
        )


class _Watched(Source):
    """A source whose bytes are noticed as they come."""

    def __init__(self, inner: Source, moved: Seen) -> None:
        self._inner, self._moved = inner, moved

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """The inner source's."""
        moved = self._moved

        def both(piece: memoryview) -> None:
            moved(piece)
            if seen is not None:
                seen(piece)

        self._inner.read_into(offset, view, both)

    def close(self) -> None:
        """The inner source's."""
        self._inner.close()


class _Files:
    """The files that are being read, each open from its first group's read to its last one's."""

    def __init__(self, reader: StepReader, groups: Iterable[Sequence[Fetch]], moved: Seen) -> None:
        self._reader, self._seen = reader, moved
        self._lock = threading.Lock()
        self._open: dict[tuple[str, bool], Source] = {}
        self._left = Counter(_source_key(group) for group in groups)

    def fetch(self, group: Sequence[Fetch]) -> None:
        key = _source_key(group)
        with self._lock:
            if key not in self._open:
                opened = self._reader.open_source(group[0].file, shared=group[0].shared)
                self._open[key] = _Watched(opened, self._seen)
            source = self._open[key]
        self._reader.fetch_together(group, source)
        with self._lock:
            self._left[key] -= 1
            if not self._left[key]:
                self._open.pop(key).close()

    def close(self) -> None:
        """After an error some are still open."""
        while self._open:
            self._open.popitem()[1].close()


def _source_key(group: Sequence[Fetch]) -> tuple[str, bool]:
    return group[0].file.name, group[0].shared


def together(fetches: Iterable[Fetch]) -> Iterator[list[Fetch]]:
    """The fetches by file and offset, small neighbours of a raw file in one group."""
    group: list[Fetch] = []
    for fetch in sorted(fetches, key=lambda fetch: (fetch.file.name, fetch.chunk.offset)):
        if group and not _joins(group, fetch):
            yield group
            group = []
        group.append(fetch)
    if group:
        yield group


def _joins(group: list[Fetch], fetch: Fetch) -> bool:
    first, last = group[0].chunk, group[-1].chunk
    return (
        fetch.file.encoding == RAW
        and fetch.file.name == group[0].file.name
        and max(last.nbytes, fetch.chunk.nbytes) <= SMALL_NBYTES
        and fetch.chunk.offset - (last.offset + last.nbytes) <= GAP_NBYTES
        and fetch.chunk.offset + fetch.chunk.nbytes - first.offset <= TOGETHER_NBYTES
    )
