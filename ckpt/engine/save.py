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
    on_error: str = "raise",
    alarms: str = "warn",
    metrics: Mapping[str, Any] | None = None,
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
    most ``budget_bytes`` on a node. ``max_write_mbps`` is the most that a node writes, in 10^6 bytes a second,
    and that retention reads back.
    ``parity=1`` writes one more file per node, as long as the longest data file of its ranks, from which any one of
    these that is lost or damaged is rebuilt, on load and by ``ckpt repair``.

    ``metrics``: name -> number (rank 0's count), saved with the step for ``ckpt ls`` and ``ckpt.keep(best=…)``.

    ``on_error="warn"``: a save that storage, a keeper or another rank failed does not end training. It is said on
    standard error and has its ``PendingSave.error``; ``result()`` still raises it, the next save and ``wait=True`` do
    not. All else is raised as ever: a newer writer, a state that cannot be saved, a rank that is gone.

    ``alarms``: NaN and infinite elements, a trained parameter of which not one byte has changed since the save before,
    replicas that differ, and random states that do not, are said on rank 0's standard error, kept in the step
    (``ckpt show``) and in ``PendingSave.alarms``. ``alarms="raise"``: such a save fails with SaveFailedError before
    it is a step (equal random states only at the first save, and only where no rank shards tensors: ranks of
    one tensor-parallel group share them rightly). ``alarms="off"``: nothing is looked for.

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
        on_error=on_error,
        alarms=alarms,
        progress_timeout_s=progress_timeout_s,
    )
    session = session_of(run)
    pending = session.save(step, state, options, metrics)
    if wait:
        session.saves.wait_for(pending)
    return pending
