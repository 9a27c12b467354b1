"""Whether the memory for snapshots can be had: reckoned before training starts, known once optimizers have state."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from ckpt.engine.options import SaveOptions
from ckpt.engine.ranks import Ranks
from ckpt.errors import CkptError, KeeperError
from ckpt.keeper.client import KeeperClient, statuses
from ckpt.keeper.memory import arena_nbytes, check_budget
from ckpt.state import flatten, moments_nbytes


def foretell(ranks: Ranks, state: Mapping[str, Any], options: SaveOptions) -> None:
    """Say on standard error, before training starts, if snapshots of such a state will need too much memory.

    The optimizers have no state yet: their moments are reckoned by their kind. Not collective; never raises.
    """
    with contextlib.suppress(CkptError, TypeError):  # what is wrong with the state the first save says
        flat = flatten(state, rank=ranks.rank, world=ranks.world)
        nbytes = sum(leaf.tensor.nbytes for leaf in (*flat.tensors, *flat.rank_tensors))
        nbytes += sum(moments_nbytes(optimizer) for optimizer in flat.optimizers)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
        what = f"{options.snapshots} snapshots of each of {here} ranks, as far as can be told before the first step"
        needed = options.snapshots * here * arena_nbytes(nbytes)
        try:
            check_budget(needed, options.budget_bytes, what, snapshots=options.snapshots)
        except KeeperError as error:
            print(f"ckpt: {error}", file=sys.stderr)


def check(ranks: Ranks, client: KeeperClient, run: str, nbytes: int, options: SaveOptions) -> None:
    """Refuse, on every rank, snapshots of ``nbytes`` of this rank that do not fit together. KeeperError. Collective."""
    node = (socket.gethostname(), client.keeper_pid)  # what the ranks that share memory have in common
    everyone = ranks.gather((node, arena_nbytes(nbytes)))
    needed = options.snapshots * sum(nbytes for where, nbytes in everyone if where == node)
    what = f"{options.snapshots} snapshots of each rank of this node"

    def look() -> None:
        # A job that was restarted finds the arenas that it had before.
        mine = [status for status in statuses() if status.pid == client.keeper_pid]
        held = sum(arena.nbytes for status in mine for arena in status.arenas if arena.run == run)
        check_budget(needed, options.budget_bytes, what, snapshots=options.snapshots, held_nbytes=held)

    ranks.all_or_none(look)
