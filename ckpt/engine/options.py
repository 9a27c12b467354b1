"""How a save is made: what ``ckpt.save`` and ``ckpt.Checkpointer`` take, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ckpt.engine.failures import ON_ERROR
from ckpt.errors import BadInputError
from ckpt.format.metrics import MAX_METRICS, MAX_NAME_CHARS, is_metric_name
from ckpt.plan.retention import KeepPolicy

PROGRESS_TIMEOUT_S = 120.0
ENCODINGS = ("raw", "zstd")
ALARMS = ("warn", "raise", "off")


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The same on all ranks.

    ``overlap``: what the optimizer owns is copied while the next forward and backward run. ``snapshots``: 2, so that a
    save need not wait for the one before, or 1, which takes half the memory. ``budget_bytes``: the most
    that the snapshots of this node's ranks may take together. ``max_write_mbps``: 10^6 bytes a second that
    the keeper writes at most, for all ranks of a node together. ``parity``: 1 writes beside the data files of each
    node's ranks a file from which any one of them can be rebuilt. ``on_error``: ``raise``, or ``warn`` where a save
    that storage or a keeper failed is said, counted and got over. ``alarms``: what becomes of a step whose state
    looks wrong: ``warn`` says it, ``raise`` fails the save, ``off`` looks for nothing.
    """

    encode: str = "raw"
    overlap: bool = False
    snapshots: int = 2
    budget_bytes: int | None = None
    max_write_mbps: float | None = None
    parity: int = 0
    on_error: str = "raise"
    alarms: str = "warn"
    keep: KeepPolicy | None = None
    progress_timeout_s: float = PROGRESS_TIMEOUT_S

    def __post_init__(self) -> None:
        """BadInputError, naming the option, for a value that it cannot have."""
        if self.encode not in ENCODINGS:
            raise BadInputError(f"encode={self.encode!r}: expected one of {', '.join(ENCODINGS)}")
        if self.on_error not in ON_ERROR:
            raise BadInputError(f"on_error={self.on_error!r}: expected one of {', '.join(ON_ERROR)}")
        if self.alarms not in ALARMS:
            raise BadInputError(f"alarms={self.alarms!r}: expected one of {', '.join(ALARMS)}")
        if self.snapshots not in {1, 2} or type(self.snapshots) is not int:
            raise BadInputError(f"snapshots={self.snapshots!r}: expected 2, or 1 to take half the memory")
        if self.parity not in {0, 1} or type(self.parity) is not int:
            raise BadInputError(f"parity={self.parity!r}: expected 0, or 1 for one parity file per node")
        if self.budget_bytes is not None:
            whole_number(self.budget_bytes, "budget_bytes", least=1)
        for name in ("max_write_mbps", "progress_timeout_s"):
            if getattr(self, name) is not None:
                positive(getattr(self, name), name)


def positive(value: Any, what: str) -> None:
    """BadInputError for what is no number above 0, or infinite."""
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadInputError(f"{what}={value!r}: expected a number above 0")


def whole_number(value: Any, what: str, *, least: int) -> int:
    """``value`` if it is an int (True is not) of at least ``least`` and below 2**63, else BadInputError."""
    if type(value) is not int or not least <= value < 2**63:
        raise BadInputError(f"{what} {value!r}: expected a whole number of at least {least}")
    return value


def measured(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a save as plain floats: from numbers, numpy's too, and tensors of one element.

    Raises BadInputError, naming the metric, for what is none.
    """
    if not isinstance(metrics, Mapping):
        raise BadInputError(f"metrics: a {type(metrics).__name__}, expected a dict of name to number")
    if len(metrics) > MAX_METRICS:
        raise BadInputError(f"metrics: {len(metrics)}, at most {MAX_METRICS} are saved with a step")
    found = {}
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise BadInputError(f"metrics[{name!r:.100}]: a name is text of 1 to {MAX_NAME_CHARS} printable characters")
        if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
            raise BadInputError(f"metrics[{name!r}]: a {type(value).__name__}, expected a number")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise BadInputError(f"metrics[{name!r}]: no number ({error})") from None
    return found
