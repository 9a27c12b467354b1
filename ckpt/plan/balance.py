"""Which replica writes what: bytes balanced over all that hold them, in few pieces. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

BALANCED = 1.1  # max / mean bytes per rank that needs no tensor to be cut
PIECES_PER_RANK = 10  # a piece of a cut tensor is at most this fraction of a rank's share: one too many is balanced yet
BUNDLES_PER_RANK = 100  # tensors below this fraction of a rank's share stay together, so that a reader opens few parts

Owners = tuple[int, ...]


class Shard(NamedTuple):
    """A shard that every replica holds: rows of dimension 0 (1 for a scalar), and the bytes of one."""

    rows: int
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.rows * self.row_nbytes


class _Item(NamedTuple):
    """What is placed at once: ``pieces`` of a tensor of at most ``nbytes`` each, or small tensors as one piece."""

    names: list[str]
    nbytes: int
    pieces: int


def spread(shards: Mapping[str, Shard], replicas: int, rank_nbytes: float = 0.0) -> dict[str, Owners]:
    """Name -> which replica writes which piece, as ``ckpt.format.layout.Tensor.owners``.

    ``rank_nbytes`` is what a rank writes on average, of these shards and of all else: balance is
    measured against it. Tensors are cut only where that balances better.
    """
    mean = sum(shard.nbytes for shard in shards.values()) / replicas
    share = max(mean, rank_nbytes)
    owners, most = _place(_items(shards, replicas, share, None), replicas)
    if most > mean + (BALANCED - 1) * share:
        owners, _ = _place(_items(shards, replicas, share, share / PIECES_PER_RANK), replicas)
    return owners


def _items(shards: Mapping[str, Shard], replicas: int, share: float, piece_nbytes: float | None) -> list[_Item]:
    """``piece_nbytes`` None: nothing is cut."""
    items: list[_Item] = []
    bundle: list[str] = []
    bundle_nbytes, small = 0, share / BUNDLES_PER_RANK
    for name, shard in shards.items():
        nbytes = shard.nbytes
        if nbytes > small:
            pieces, most = 1, nbytes
            if piece_nbytes is not None and nbytes > piece_nbytes:
                pieces, rows = _cut(shard, replicas, piece_nbytes)
                most = rows * shard.row_nbytes
            items.append(_Item([name], most, pieces))
            continue
        if bundle and bundle_nbytes + nbytes > small:
            items.append(_Item(bundle, bundle_nbytes, 1))
            bundle, bundle_nbytes = [], 0
        bundle.append(name)
        bundle_nbytes += nbytes
    if bundle:
        items.append(_Item(bundle, bundle_nbytes, 1))
    return items


def _cut(shard: Shard, replicas: int, piece_nbytes: float) -> tuple[int, int]:
    """(pieces, rows of the longest): by torch.chunk's rule, none of them empty."""
    rows = max(1, int(piece_nbytes // shard.row_nbytes), -(-shard.rows // replicas))
    pieces = -(-shard.rows // rows)
    rows = -(-shard.rows // pieces)
    return -(-shard.rows // rows), rows


def _place(items: list[_Item], replicas: int) -> tuple[dict[str, Owners], int]:
    """Owners, and the bytes of the replica with the most: largest first to the least loaded."""
    loads = _Loads(replicas)
    owners: dict[str, Owners] = {}
    for item in sorted(items, key=lambda item: -item.nbytes):
        # Ascending, so that neighbouring pieces of one owner stay neighbours in its file.
        chosen = tuple(sorted(loads.least(item.pieces, item.nbytes)))
        for name in item.names:
            owners[name] = chosen
    return owners, loads.most()


class _Loads:
    """Replicas by their bytes so far. Those with equal bytes wait in one line: there are many replicas, few loads."""

    def __init__(self, replicas: int) -> None:
        self._lines: dict[int, deque[int]] = {0: deque(range(replicas))}
        self._heap = [0]  # the loads that have a line

    def least(self, count: int, nbytes: int) -> list[int]:
        """The ``count`` least loaded replicas, one after the other, each loaded with ``nbytes`` more."""
        chosen: list[int] = []
        while len(chosen) < count:
            load = self._heap[0]
            line = self._lines[load]
            taken = [line.popleft() for _ in range(min(count - len(chosen), len(line)))]
            chosen += taken
            if not line:
                heapq.heappop(self._heap)
                del self._lines[load]
            longer = self._lines.get(load + nbytes)
            if longer is None:
                self._lines[load + nbytes] = deque(taken)
                heapq.heappush(self._heap, load + nbytes)
            else:
                longer.extend(taken)
        return chosen

    def most(self) -> int:
        """The largest load."""
        return max(self._heap)
