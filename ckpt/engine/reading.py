"""Carrying out a load's reads: many chunks at a time, small neighbours together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ckpt.engine.tensors import Fetch, StepReader
from ckpt.format.chunk import RAW

THREADS = 2  # one waits for the storage while the other digests; more only fight for a rank's core
SMALL_NBYTES = 256 << 10  # a chunk that is read together with its neighbours
GAP_NBYTES = 64 << 10  # bytes between two of them that are read for nothing
TOGETHER_NBYTES = 8 << 20


def fetch_all(reader: StepReader, fetches: Iterable[Fetch]) -> int:
    """Carry out ``fetches``, in whatever order is quick; the bytes of tensors that came.

    The first error is raised when every read that had begun has ended; the targets are spoiled then.
    """
    work = list(fetches)
    groups = list(together(work))
    if len(groups) <= 1:
        for group in groups:
            reader.fetch_together(group)
    else:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-read") as pool:
            futures = [pool.submit(reader.fetch_together, group) for group in groups]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)
            for future in futures:  # in the order of the files, so that the message does not depend on chance
                if future in done and not future.cancelled():
                    future.result()
    return sum(fetch.chunk.nbytes for fetch in work)


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
