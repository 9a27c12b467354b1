"""How a save is made: what ``ckpt.save`` and ``ckpt.Checkpointer`` take, checked in one place."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ckpt.errors import BadInputError

PROGRESS_TIMEOUT_S = 120.0
ENCODINGS = ("raw", "zstd")


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The same on all ranks.

    ``overlap``: what the optimizer owns is copied while the next forward and backward run. ``snapshots``: 2, so that a
    save need not wait for the one before, or 1, which takes half the memory. ``budget_bytes``: the most
    that the snapshots of this node's ranks may take together. ``max_write_mbps``: 10^6 bytes a second that
    the keeper writes at most, for all ranks of a node together. ``parity``: 1 writes beside the data files of each
    node's ranks a file from which any one of them can be rebuilt.
    """

    encode: str = "raw"
    overlap: bool = False
    snapshots: int = 2
    budget_bytes: int | None = None
    max_write_mbps: float | None = None
    parity: int = 0
    keep_last: int | None = None
    keep_every: int | None = None
    progress_timeout_s: float = PROGRESS_TIMEOUT_S

    def __post_init__(self) -> None:
        """BadInputError, naming the option, for a value that it cannot have."""
        if self.encode not in ENCODINGS:
            raise BadInputError(f"encode={self.encode!r}: expected one of {', '.join(ENCODINGS)}")
        if self.snapshots not in {1, 2} or type(self.snapshots) is not int:
            raise BadInputError(f"snapshots={self.snapshots!r}: expected 2, or 1 to take half the memory")
        if self.parity not in {0, 1} or type(self.parity) is not int:
            raise BadInputError(f"parity={self.parity!r}: expected 0, or 1 for one parity file per node")
        if self.budget_bytes is not None:
            whole_number(self.budget_bytes, "budget_bytes", least=1)
        for name in ("max_write_mbps", "progress_timeout_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not 0 < value < math.inf):
                raise BadInputError(f"{name}={value!r}: expected a number above 0")


def whole_number(value: Any, what: str, *, least: int) -> int:
    """``value`` if it is an int (True is not) of at least ``least`` and below 2**63, else BadInputError."""
    if type(value) is not int or not least <= value < 2**63:
        raise BadInputError(f"{what} {value!r}: expected a whole number of at least {least}")
    return value
