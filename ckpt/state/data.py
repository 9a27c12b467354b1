"""Training data with a position that outlives the job: the same samples in the same order, whatever the world size.

``order(epoch)`` is one permutation for all ranks, a function of seed and epoch. The position counts
samples of the epoch that all ranks together have been handed; a global batch is the next
``global_batch_size`` of them, cut into contiguous shares, one per rank. So a job of another size
goes on at the very sample where the last one stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ckpt.errors import BadInputError

_MASK_63_BITS = 2**63 - 1


class ResumableLoader:
    """Batches of a map-style dataset, resumable at any batch of any epoch: ``{"data": loader}`` in a state.

    ``iter(loader)`` yields what is left of the current epoch (nothing, when its last batch was the last
    one handed out) and then moves to the next epoch; ``forever()`` goes on over epochs. The position
    is that of the batches handed out, not of those prefetched, and a resumed loader never reads a
    sample that was passed. One iterator at a time: an older one raises BadInputError.

    ``batch_size`` is per rank; give ``global_batch_size`` instead to keep the global batch when the
    world size changes. Rank r of W takes samples ``[n*r//W, n*(r+1)//W)`` of a global batch of n, so shares differ
    by one at most. The last global batch of an epoch is what is left (none with ``drop_last``);
    when that is fewer samples than ranks it joins the batch before, so that every rank has the same
    number of batches, none is empty, and each sample comes exactly once. (One exception: a job that
    resumes on more ranks than samples are left in the epoch reads some of these twice.)
    ``len(loader)`` is the number of batches in a whole epoch.

    Python's, numpy's and torch's generators are not touched in this process. In worker processes they
    are seeded for each sample from (seed, epoch, index), so augmentation depends neither on the number
    of workers nor on where a job was resumed (for each batch, from its first index, where the dataset
    has ``__getitems__``). ``rank`` and ``world`` default to the process group's.

    Raises BadInputError for what it cannot number: an iterable-style dataset, fewer samples than ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout_s: float = 0,
    ) -> None:
        if (
            isinstance(dataset, IterableDataset)
            or not isinstance(dataset, Sized)
            or not hasattr(dataset, "__getitem__")
        ):
            raise BadInputError(
                f"dataset: a {type(dataset).__qualname__} without len() and [index]; a position can only be kept in a "
                "map-style dataset, use torchdata's StatefulDataLoader for a stream"
            )
        self.rank, self.world = _ranks(rank, world)
        self.global_batch_size = _global_batch_size(batch_size, global_batch_size, self.world)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0  # the epoch that iter() goes on with, from 0
        self.position = 0  # samples of it that were handed out, over all ranks
        self._length = len(dataset)
        self._turn: object = None  # the iterator that may go on
        least = self.global_batch_size if drop_last else self.world
        if self._length < least:
            raise BadInputError(
                f"dataset: {self._length} samples are fewer than "
                + (f"one global batch of {least}; use drop_last=False" if drop_last else f"the {least} ranks")
            )
        self._base = torch.Generator()  # of the workers' base seed, so that the global generator is left alone
        self._loader: DataLoader[Any] = DataLoader(
            _Samples(dataset),
            batch_sampler=_Batches(self),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout_s,
            generator=self._base,
        )

    def __len__(self) -> int:
        """Batches in a whole epoch, equal on all ranks."""
        return len(self.spans(0))

    def __iter__(self) -> Iterator[Any]:
        turn = self._turn = object()
        spans = self.spans(self.position)
        if spans:  # else its last batch was handed out, perhaps before a restart
            self._base.manual_seed(_seed(self.seed, self.epoch, "workers"))
            for (_, stop), batch in zip(spans, self._loader, strict=True):
                self.position = stop
                yield batch
                if self._turn is not turn:
                    raise BadInputError(
                        "data: this iterator is out of date, since another was begun or a state was loaded; "
                        "call iter(loader) anew"
                    )
        self.epoch += 1
        self.position = 0

    def forever(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch, from the position on."""
        while True:
            yield from self

    def order(self, epoch: int) -> torch.Tensor:
        """The samples of an epoch in order, int64 of shape (length,); the same on every rank of any world."""
        if not self.shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(_seed(self.seed, epoch, "order"))
        return torch.randperm(self._length, generator=generator)

    def spans(self, position: int) -> list[tuple[int, int]]:
        """``[start, stop)`` in the epoch's order of every global batch from ``position`` on."""
        step = self.global_batch_size
        bounds = list(range(position, self._length + 1, step))
        left = self._length - bounds[-1]
        if left and not self.drop_last:
            if left < self.world and len(bounds) > 1:
                bounds.pop()
            bounds.append(self._length)
        return list(itertools.pairwise(bounds))

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's part of the global batch ``[start, stop)``; never empty."""
        count = stop - start
        if count < self.world:  # only when a larger world resumes before the last few samples of an epoch
            first = start + self.rank % count
            return first, first + 1
        return start + count * self.rank // self.world, start + count * (self.rank + 1) // self.world

    def state_dict(self) -> dict[str, Any]:
        """Position and what it refers to; equal on all ranks at a step boundary."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "length": self._length,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved position. BadInputError when it was of another order: seed, length or shuffle differ."""
        for what, mine in (("seed", self.seed), ("length", self._length), ("shuffle", self.shuffle)):
            if state_dict[what] != mine:
                raise BadInputError(
                    f"data: the saved position is one of {what}={state_dict[what]!r}, but this loader has "
                    f"{what}={mine!r}, so its order is another; make the loader as before, or leave its key out of "
                    "the state to start at the first sample"
                )
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
        self._turn = None


class _Batches:
    """Index lists of this rank's batches from the loader's position on, as a DataLoader's batch sampler."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader.spans(self._loader.position))

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        loader = self._loader
        seed, epoch, order = loader.seed, loader.epoch, loader.order(loader.epoch)
        for start, stop in loader.spans(loader.position):
            first, last = loader.share(start, stop)
            yield [(seed, epoch, index) for index in order[first:last].tolist()]


class _Samples(Dataset[Any]):
    """The dataset, indexed by (seed, epoch, index); in a worker the generators are seeded for each sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, int, int]) -> Any:
        _seed_worker(key)
        return self._dataset[key[2]]

    def __getitems__(self, keys: list[tuple[int, int, int]]) -> list[Any]:  # the DataLoader asks for whole batches
        fetch = getattr(self._dataset, "__getitems__", None)
        if not callable(fetch):
            return [self[key] for key in keys]
        _seed_worker(keys[0])
        batch: list[Any] = fetch([index for _, _, index in keys])
        return batch


def _seed_worker(key: tuple[int, int, int]) -> None:
    """In a worker process, seed its generators; elsewhere they are the training's own."""
    if get_worker_info() is None:
        return
    seed, epoch, index = key
    number = _seed(seed, epoch, str(index))
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(number % 2**32)


def _ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise BadInputError(f"rank={rank!r}, world={world!r}: give both or neither")
    if rank is not None and world is not None:
        if not 0 <= rank < world:
            raise BadInputError(f"rank={rank}: expected 0 to {world - 1}, for world={world}")
        return rank, world
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadInputError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but no process group is initialized, so every rank would "
            "read the same samples; call init_process_group first, or give rank and world"
        )
    return 0, 1


def _global_batch_size(batch_size: int | None, global_batch_size: int | None, world: int) -> int:
    if (batch_size is None) == (global_batch_size is None):
        raise BadInputError("give either batch_size (per rank) or global_batch_size")
    size = batch_size * world if batch_size is not None else global_batch_size
    assert size is not None
    if size < world:
        raise BadInputError(f"a global batch of {size} samples cannot be shared by {world} ranks; make it larger")
    return size


def _seed(seed: int, epoch: int, what: str) -> int:
    """63 bits of SHA-256: unlike seed + epoch, no two epochs of neighbouring seeds are alike."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{what}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & _MASK_63_BITS
