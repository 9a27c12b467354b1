"""``ckpt.save``: copy a state aside, and let the keeper write and commit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.engine.options import PROGRESS_TIMEOUT_S, SaveOptions
from ckpt.engine.pending import PendingSave
from ckpt.engine.session import session_of


def save(
    run: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    wait: bool = False,
    encode: str = "raw",
    overlap: bool = False,
    snapshots: int = 2,
    budget_bytes: int | None = None,
    max_write_mbps: float | None = None,
    parity: int = 0,
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> PendingSave:
    """Save ``state`` as step ``step`` of ``run``; every rank of the process group calls it.

    When it returns, everything has been copied: the caller may change or free the state. The
    keeper then writes and commits it, even if this process dies; ``PendingSave.result()`` waits
    for that, and so does ``wait=True``. A failure is raised by ``result()``, else by the next save.

    ``overlap=True``: what the optimizers of the state own (parameters and their moments) is copied while the next
    forward and backward run, and the next step of any optimizer waits for it. To change it otherwise,
    wait for ``PendingSave.wait_copied()``: a change in between fails the save, naming the tensors, as far as samples
    of each tensor show it.

    ``encode="zstd"`` compresses each chunk that gets smaller (for slow stores). The snapshots take memory of
    ``snapshots`` (2, or 1: each save then waits until the one before is durable) times what a rank writes, and of at
    most ``budget_bytes`` on a node. ``max_write_mbps`` is the most that a node writes, in 10^6 bytes a second.
    ``parity=1`` writes one more file per node, as long as the longest data file of its ranks, from which any one of
    these that is lost or damaged is rebuilt, on load and by ``ckpt repair``.

    Raises UnsupportedValueError or BadInputError, naming the tensor or value, before a byte is
    written; KeeperError when there is too little memory; FencedError when a newer writer holds the run; the
    error of the previous save when nobody was told of it.
    """
    options = SaveOptions(
        encode=encode,
        overlap=overlap,
        snapshots=snapshots,
        budget_bytes=budget_bytes,
        max_write_mbps=max_write_mbps,
        parity=parity,
        progress_timeout_s=progress_timeout_s,
    )
    pending = session_of(run).save(step, state, options)
    if wait:
        pending.result()
    return pending
