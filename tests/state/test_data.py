"""ResumableLoader: the same samples at any batch of any epoch, on any number of ranks."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import ckpt
from ckpt.errors import BadInputError
from tests.state.steps import save


class Counting(Dataset):
    """range(n) that counts how often it is read."""

    def __init__(self, n):
        self.n = n
        self.reads = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.reads.append(index)
        return index


def loader(n=10, batch_size=3, *, dataset=None, **options):
    return ckpt.ResumableLoader(dataset or Counting(n), batch_size, collate_fn=list, **options)


def ids(iterator, count=None):
    return list(iterator if count is None else itertools.islice(iterator, count))


def epochs(loaders, last=3):
    """[epoch][rank][batch] until ``last`` epochs are done."""
    found = []
    while loaders[0].epoch < last:
        found.append([ids(one) for one in loaders])
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_s29_resume_at_every_batch(world, drop_last):
    """Stop after any batch of any epoch; the ids before and after make up the uninterrupted run, per rank."""

    def make():
        return [loader(seed=3, rank=r, world=world, drop_last=drop_last, batch_size=3 // world) for r in range(world)]

    whole = [[batch for epoch in epochs(make()) for batch in epoch[r]] for r in range(world)]
    batches = len(whole[0])
    assert batches == 3 * len(make()[0])
    assert all(len(rank) == batches for rank in whole)
    for stop in range(batches + 1):
        first = make()
        before = [ids(one.forever(), stop) for one in first]
        states = [save({"data": one}) for one in first]
        assert len({str(s.read()) for s in states}) == 1
        second = make()
        for rank, one in enumerate(second):
            states[rank].load({"data": one})
            rest = ids(one.forever(), batches - stop)
            assert before[rank] + rest == whole[rank], (stop, rank)


@pytest.mark.parametrize(("n", "world", "batch_size"), list(itertools.product((7, 10, 12), (1, 2, 3, 4), (1, 2, 5))))
def test_every_sample_exactly_once(n, world, batch_size):
    """Each epoch is a permutation cut without gaps; ranks have equally many batches, none empty."""
    found = epochs([loader(n, batch_size, seed=1, rank=r, world=world) for r in range(world)], last=2)
    for epoch in found:
        assert len({len(batches) for batches in epoch}) == 1
        assert all(batch for batches in epoch for batch in batches)
        assert sorted(i for batches in epoch for batch in batches for i in batch) == list(range(n))
        in_order = [i for group in zip(*epoch, strict=True) for batch in group for i in batch]
        assert len(in_order) == n
    orders = [[i for g in zip(*epoch, strict=True) for batch in g for i in batch] for epoch in found]
    assert orders[0] != orders[1]
    assert orders[0] == loader(n, seed=1, rank=0, world=1).order(0).tolist()


def test_drop_last():
    """The incomplete global batch is left out, on every rank."""
    found = epochs([loader(11, 2, seed=1, rank=r, world=2, drop_last=True) for r in range(2)], last=1)[0]
    assert [len(batch) for batches in found for batch in batches] == [2] * 4


@pytest.mark.parametrize("worlds", [(4, 2, 3), (2, 1), (1, 4), (3, 3)])
def test_another_world_size_goes_on_at_the_very_sample(worlds):
    """With a fixed global batch, every sample of the epoch comes once, in the one order, across restarts."""
    n, global_batch = 50, 12
    seen, state = [], None
    for turn, world in enumerate(worlds):
        loaders = [loader(n, None, global_batch_size=global_batch, seed=2, rank=r, world=world) for r in range(world)]
        if state is not None:
            for one in loaders:
                one.load_state_dict(state)
        count = 1 if turn < len(worlds) - 1 else None
        batches = [ids(iter(one), count) for one in loaders]
        for group in zip(*batches, strict=True):
            seen += [i for batch in group for i in batch]
        state = loaders[0].state_dict()
        assert all(one.state_dict() == state for one in loaders)
    assert seen == loader(n, seed=2, rank=0, world=1).order(0).tolist()


def test_more_ranks_than_samples_left():
    """The one case in which a sample comes twice: no rank may have an empty batch."""
    loaders = [loader(10, None, global_batch_size=4, shuffle=False, rank=r, world=4) for r in range(4)]
    for one in loaders:
        one.load_state_dict({"epoch": 0, "position": 8, "seed": 0, "length": 10, "shuffle": False})
    assert [ids(one) for one in loaders] == [[[8]], [[9]], [[8]], [[9]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_s29_skipped_data_is_not_read(workers):
    """A resumed loader reads what is left and nothing else; the position counts batches handed out, not prefetched."""
    first = loader(40, 2, seed=5, num_workers=workers, rank=0, world=1)
    before = ids(iter(first), 7)
    state = first.state_dict()
    assert state["position"] == 14
    data = Counting(40)
    second = loader(dataset=data, batch_size=2, seed=5, num_workers=workers, rank=0, world=1)
    second.load_state_dict(state)
    rest = ids(second)
    assert len(rest) == 13
    assert sorted(i for batch in before + rest for i in batch) == list(range(40))
    if not workers:  # a worker counts in its own process
        assert len(data.reads) == 26


def test_reading_ahead_is_bounded():
    """Without workers nothing is read before it is asked for."""
    data = Counting(20)
    it = iter(loader(dataset=data, batch_size=4, rank=0, world=1))
    next(it)
    assert len(data.reads) == 4


def test_an_epoch_that_is_done_is_followed_by_the_next():
    """Saved in the body of the last batch: what is left is nothing, then comes the next epoch."""
    first = loader(6, 3, rank=0, world=1)
    it = iter(first)
    next(it), next(it)
    second = loader(6, 3, rank=0, world=1)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, second.position) == (0, 6)
    assert ids(second) == []
    assert second.epoch == 1
    assert len(ids(second)) == 2
    assert len(second) == 2


def test_one_iterator_at_a_time():
    """An older iterator says that it is out of date instead of handing out other samples."""
    one = loader(12, 2, shuffle=False, rank=0, world=1)
    old = iter(one)
    assert next(old) == [0, 1]
    assert next(iter(one)) == [2, 3]
    with pytest.raises(BadInputError, match="out of date"):
        next(old)
    current = iter(one)
    assert next(current) == [4, 5]
    one.load_state_dict(one.state_dict())
    with pytest.raises(BadInputError, match="out of date"):
        next(current)
    late = iter(one)
    one.load_state_dict({**one.state_dict(), "position": 10})
    assert next(late) == [10, 11]


def test_generators_of_the_training_are_left_alone():
    """Neither making, shuffling nor starting workers draws a number here."""
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    for workers in (0, 2):
        ids(loader(8, 2, num_workers=workers, rank=0, world=1))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


class Augmented(Counting):
    def __getitem__(self, index):
        return index, random.random(), float(np.random.rand()), torch.rand(1).item()


def test_augmentation_in_workers_depends_on_the_sample_only():
    """Resumed, or on another number of workers, a sample of an epoch is augmented alike; another epoch differs."""

    def make(workers):
        return loader(dataset=Augmented(12), batch_size=2, seed=4, num_workers=workers, rank=0, world=1)

    whole = ids(make(1).forever(), 12)
    assert ids(make(2).forever(), 12) == whole
    first = make(2)
    ids(iter(first), 2)
    second = make(1)
    second.load_state_dict(first.state_dict())
    assert ids(second) == whole[2:6]
    by_epoch = [{sample[0]: sample for batch in part for sample in batch} for part in (whole[:6], whole[6:])]
    assert all(by_epoch[0][i] != by_epoch[1][i] for i in range(12))


def test_persistent_workers():
    """They serve every epoch, and a new position."""
    one = loader(12, 2, shuffle=False, num_workers=1, persistent_workers=True, rank=0, world=1)
    assert ids(one) == [[i, i + 1] for i in range(0, 12, 2)]
    it = iter(one)
    next(it)
    one.load_state_dict({**one.state_dict(), "position": 8})
    assert ids(one) == [[8, 9], [10, 11]]


def test_default_collation_and_whole_batches():
    """Tensors are stacked as by a DataLoader, and a dataset's own batch fetch is used."""

    class Fetches(Counting):
        def __getitems__(self, indices):
            return [100 + i for i in indices]

    assert ids(loader(4, 2, dataset=Fetches(4), shuffle=False, rank=0, world=1)) == [[100, 101], [102, 103]]
    stacked = ckpt.ResumableLoader(TensorDataset(torch.arange(4.0)), 2, shuffle=False, rank=0, world=1)
    assert [batch[0].tolist() for batch in stacked] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("what", "options"), [("seed", {"seed": 9}), ("length", {"n": 9}), ("shuffle", {"shuffle": False})]
)
def test_a_position_of_another_order_is_refused(what, options):
    """Seed, length and shuffle make the order; the message says which differs."""
    state = loader(rank=0, world=1).state_dict()
    other = loader(rank=0, world=1, **options)
    with pytest.raises(BadInputError, match=rf"data: .*{what}="):
        other.load_state_dict(state)
    with pytest.raises(BadInputError, match=rf"data: .*{what}="):
        save({"data": loader(rank=0, world=1)}).load({"data": other})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ckpt.ResumableLoader(Stream(), 1, rank=0, world=1), "map-style"),
        (lambda: ckpt.ResumableLoader(range(3), rank=0, world=1), "either batch_size"),
        (lambda: ckpt.ResumableLoader(range(3), 1, global_batch_size=1, rank=0, world=1), "either batch_size"),
        (lambda: ckpt.ResumableLoader(range(9), global_batch_size=2, rank=0, world=3), "cannot be shared by 3 ranks"),
        (lambda: ckpt.ResumableLoader(range(9), 0, rank=0, world=1), "global batch of 0"),
        (lambda: ckpt.ResumableLoader(range(2), 1, rank=0, world=3), "2 samples are fewer than the 3 ranks"),
        (lambda: ckpt.ResumableLoader(range(3), 4, drop_last=True, rank=0, world=1), "fewer than one global batch"),
        (lambda: ckpt.ResumableLoader(range(3), 1, rank=0), "both or neither"),
        (lambda: ckpt.ResumableLoader(range(3), 1, rank=3, world=3), "expected 0 to 2"),
    ],
)
def test_bad_input(make, words):
    """One clear sentence each."""
    with pytest.raises(BadInputError, match=words):
        make()


def test_a_world_without_a_process_group_is_refused(monkeypatch):
    """Else every rank would read the same samples."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInputError, match="WORLD_SIZE is 2 but no process group"):
        ckpt.ResumableLoader(range(9), 1)


def test_a_stateful_loader_is_per_rank_by_itself():
    """torchdata's class is known by its name, wherever it comes from."""
    from ckpt.format.values import RankRef
    from ckpt.state import flatten

    class StatefulDataLoader:
        def state_dict(self):
            return {"at": 3}

        def load_state_dict(self, state):
            self.state = state

    class Mine(StatefulDataLoader):
        pass

    flat = flatten({"data": Mine()}, rank=1, world=2)
    assert flat.values == {"data": RankRef("data")}
    assert flat.rank_values == {"data": {"at": 3}}
    mine = Mine()
    save({"data": Mine()}).load({"data": mine})
    assert mine.state == {"at": 3}
