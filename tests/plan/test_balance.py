"""Which replica writes what: every piece once, none empty, nobody far above the mean, small tensors together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.plan.balance import BALANCED, BUNDLES_PER_RANK, PIECES_PER_RANK, Shard, _Loads, spread
from ckpt.plan.boxes import chunk_bounds

shards = st.lists(
    st.builds(Shard, st.integers(1, 200), st.sampled_from([0, 1, 4, 64, 1000, 4096])), min_size=1, max_size=40
).map(lambda found: {f"t{i}": shard for i, shard in enumerate(found)})


def loads(shards: dict[str, Shard], owners: dict[str, tuple[int, ...]], replicas: int) -> list[int]:
    """Bytes of each replica, piece by piece."""
    nbytes = [0] * replicas
    for name, shard in shards.items():
        for piece, owner in enumerate(owners[name]):
            start, stop = chunk_bounds(shard.rows, len(owners[name]), piece)
            nbytes[owner] += (stop - start) * shard.row_nbytes
    return nbytes


@given(shards, st.integers(1, 20), st.sampled_from([0.0, 1000.0, 1e6]))
@settings(max_examples=400, deadline=None)
def test_every_piece_has_an_owner_and_rows(shards: dict[str, Shard], replicas: int, rank_nbytes: float) -> None:
    """Owners are replicas, ascending; no piece is empty; all bytes are written."""
    owners = spread(shards, replicas, rank_nbytes)
    assert owners.keys() == shards.keys()
    for name, shard in shards.items():
        pieces = owners[name]
        assert pieces == tuple(sorted(pieces))
        assert set(pieces) <= set(range(replicas))
        bounds = [chunk_bounds(shard.rows, len(pieces), i) for i in range(len(pieces))]
        assert all(start < stop for start, stop in bounds)
    assert sum(loads(shards, owners, replicas)) == sum(shard.nbytes for shard in shards.values())
    assert spread(shards, replicas, rank_nbytes) == owners


@given(shards, st.integers(1, 20))
@settings(max_examples=400, deadline=None)
def test_nobody_is_far_above_the_mean(shards: dict[str, Shard], replicas: int) -> None:
    """At most a tenth, or one row, where rows are longer than that; or one piece where all replicas have one."""
    found = loads(shards, spread(shards, replicas), replicas)
    mean = sum(found) / replicas
    slack = mean / PIECES_PER_RANK
    indivisible = max(shard.row_nbytes * -(-shard.rows // replicas) for shard in shards.values())
    assert max(found) <= mean + max(slack, (BALANCED - 1) * mean, indivisible) + 1e-6


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=30), st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_lines_of_equal_loads_are_the_plain_rule(takes: list[tuple[int, int]], replicas: int) -> None:
    """Whoever is asked is one of the least loaded at that moment, as if all loads were looked through each time."""
    lines, plain = _Loads(replicas), [0] * replicas
    for count, nbytes in takes:
        for chosen in lines.least(count, nbytes):
            assert plain[chosen] == min(plain)
            plain[chosen] += nbytes
    assert lines.most() == max(plain)


def test_small_tensors_stay_together() -> None:
    """A thousand scalars beside sharded gigabytes are one rank's: whoever loads them opens one part for all."""
    scalars = {f"step.{i}": Shard(1, 4) for i in range(1000)}
    assert set(spread(scalars, 4096, rank_nbytes=400e6).values()) == {(0,)}


def test_small_tensors_are_spread_in_bundles_when_they_are_all_there_is() -> None:
    """No bundle is more than a hundredth of a rank's share, so that balance does not suffer."""
    tensors = {f"{i}": Shard(1, 4) for i in range(100_000)}
    owners = spread(tensors, 10)
    found = loads(tensors, owners, 10)
    assert max(found) <= min(found) + 400_000 / 10 / BUNDLES_PER_RANK
    changes = sum(owners[f"{i}"] != owners[f"{i + 1}"] for i in range(99_999))
    assert changes <= 10 * BUNDLES_PER_RANK


def test_a_large_tensor_is_cut_for_many_replicas() -> None:
    """More replicas than tensors: each still writes about its share."""
    tensors = {"embedding": Shard(131_072, 4096), "head": Shard(131_072, 4096), "norm": Shard(1024, 4)}
    found = loads(tensors, spread(tensors, 1000), 1000)
    assert max(found) <= BALANCED * sum(found) / 1000
