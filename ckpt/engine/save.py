"""``ckpt.save``: copy a state aside, and let the keeper write and commit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.engine.session import PROGRESS_TIMEOUT_S, PendingSave, session_of
from ckpt.errors import BadInputError

ENCODINGS = ("raw", "zstd")


def save(
    run: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    wait: bool = False,
    encode: str = "raw",
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> PendingSave:
    """Save ``state`` as step ``step`` of ``run``; every rank of the process group calls it.

    When it returns, everything has been copied: the caller may change or free the state. The
    keeper then writes and commits it, even if this process dies; ``PendingSave.result()`` waits
    for that, and so does ``wait=True``. A failure is raised by ``result()``, else by the next save.

    ``encode="zstd"`` compresses each chunk that gets smaller (for slow stores).

    Raises UnsupportedValueError or BadInputError, naming the tensor or value, before a byte is
    written; FencedError when a newer writer holds the run; the error of the previous save when
    nobody was told of it.
    """
    if encode not in ENCODINGS:
        raise BadInputError(f"encode={encode!r}: expected one of {', '.join(ENCODINGS)}")
    pending = session_of(run).save(step, state, encode=encode, progress_timeout_s=progress_timeout_s)
    if wait:
        pending.result()
    return pending
