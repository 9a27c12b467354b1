"""Steps with alarms, saved through a real keeper: the one that trainers found, and what the keeper counts itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt.format import records
from ckpt.format.alarms import NOT_FINITE, REPLICAS, Alarm
from ckpt.keeper.alarms import ShardWatch, encode_watch
from ckpt.keeper.client import KeeperClient
from ckpt.keeper.protocol import WatchTask
from tests.keeper.rank_process import fill, hand_over

FOUND = (Alarm(NOT_FINITE, "model.a", nan=2, inf=1), Alarm(REPLICAS, "model.b", ranks=((0, 0),)))


def save_with_alarms(client: KeeperClient, url: str, step: int, found: Sequence[Alarm], value: float = 0.0) -> None:
    """Save ``model.w``, 2500 floats of ``value``, as one rank; ``found`` is what its trainer says."""
    raw = encode_watch([[ShardWatch("model.w", "float32", False)]])
    watch = WatchTask(records.digest(raw), raw)
    arena, task = fill(client, url, step, step, watch=watch, found=tuple(found))
    arena.view[4096 : 4096 + 10_000] = np.full(2500, value, "<f4").tobytes()
    hand_over(client, task).wait(60)
