"""``metrics.json``: the numbers that were given with a save, such as a validation loss. Pinned by COMMIT."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ckpt.errors import DamagedError
from ckpt.format import records
from ckpt.format.commit import Attempt

METRICS = "metrics.json"
METRICS_LIMIT_NBYTES = 1 << 20
MAX_METRICS = 1000
MAX_NAME_CHARS = 200

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record: name -> a JSON number, or ``"nan"``, ``"inf"``, ``"-inf"``, which JSON has no numbers for."""

    format: str
    step: int
    attempt: str
    metrics: dict[str, float | str]


def encode_metrics(attempt: Attempt, metrics: Mapping[str, float]) -> bytes:
    """The record's bytes. BadInputError, naming the metric, for what no reader would take."""
    written = {name: json_number(value) for name, value in sorted(metrics.items())}
    return records.encode_checked(Metrics(records.FORMAT, attempt.step, attempt.label, written), check_metrics)


def decode_metrics(raw: bytes, attempt: Attempt, where: str) -> dict[str, float]:
    """Name -> number. DamagedError for a record that is malformed or another attempt's."""
    found = records.decode(raw, Metrics, where)
    if (found.step, found.attempt) != (attempt.step, attempt.label):
        raise DamagedError(f"{where}: is of step {found.step} {found.attempt}, expected {attempt.step} {attempt.label}")
    check_metrics(found, where)
    return {name: _NOT_FINITE[value] if isinstance(value, str) else value for name, value in found.metrics.items()}


def check_metrics(record: Metrics, where: str) -> None:
    """DamagedError for a record that no ckpt wrote, although it can be read."""
    if len(record.metrics) > MAX_METRICS:
        raise records.damaged(where, f"{len(record.metrics)} metrics", f"at most {MAX_METRICS}")
    for name, value in record.metrics.items():
        if not is_metric_name(name):
            expected = f"1 to {MAX_NAME_CHARS} printable characters"
            raise records.damaged(where, f"the metric's name {name[:64]!r}", expected)
        if isinstance(value, str) and value not in _NOT_FINITE:
            raise records.damaged(where, f"the metric {name!r} with {value[:64]!r}", "a number, nan, inf or -inf")


def is_metric_name(name: object) -> bool:
    """Whether a metric may be called so: text that a line of a terminal can show."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def json_number(value: float) -> float | str:
    """A number as JSON can have it: itself, or ``nan``, ``inf``, ``-inf`` as text."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
