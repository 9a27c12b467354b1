"""metrics.json: numbers survive as they are, and nothing else gets in."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import BadInputError, DamagedError, UnsupportedFormatError
from ckpt.format.commit import Attempt
from ckpt.format.metrics import MAX_METRICS, METRICS_LIMIT_NBYTES, decode_metrics, encode_metrics

ATTEMPT = Attempt(300, 7, 3)


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


@given(st.dictionaries(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1), st.floats()))
def test_numbers_survive(metrics: dict[str, float]) -> None:
    """Every float comes back bit for bit, infinities and the sign of zero too; a NaN is a NaN."""
    metrics = {name[:200]: value for name, value in metrics.items() if name[:200].isprintable()}
    raw = encode_metrics(ATTEMPT, metrics)
    json.loads(raw, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    found = decode_metrics(raw, ATTEMPT, "here")
    assert {name: bits(value) for name, value in found.items()} == {name: bits(v) for name, v in metrics.items()}
    assert list(found) == sorted(metrics)


def test_the_bytes() -> None:
    """What SPEC.md shows."""
    raw = encode_metrics(ATTEMPT, {"val_loss": 1.25, "accuracy": math.nan, "low": -math.inf})
    assert raw == (
        b'{"format":"ckpt/1","step":300,"attempt":"w7.3","metrics":{"accuracy":"nan","low":"-inf","val_loss":1.25}}'
    )


@pytest.mark.parametrize("name", ["", "a" * 201, "a\nb", "\x1b[31m", "\x00"])
def test_names_that_no_line_can_show(name: str) -> None:
    """Refused when written, damage when read."""
    with pytest.raises(BadInputError, match="printable characters"):
        encode_metrics(ATTEMPT, {name: 1.0})
    raw = encode_metrics(ATTEMPT, {"x": 1.0}).replace(b'"x"', json.dumps(name).encode())
    with pytest.raises(DamagedError, match="printable characters"):
        decode_metrics(raw, ATTEMPT, "here")


def test_too_many() -> None:
    """At most so many, which all fit into the limit."""
    most = {f"{i:04d}" + "\U0001f600" * 196: 1e-308 * i for i in range(MAX_METRICS)}
    assert len(encode_metrics(ATTEMPT, most)) < METRICS_LIMIT_NBYTES
    with pytest.raises(BadInputError, match="1001 metrics"):
        encode_metrics(ATTEMPT, {**most, "one more": 0.0})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "not a readable"),
        (b'{"format":"ckpt/1","step":300,"attempt":"w7.3","metrics":{"a":"1.0"}}', "nan, inf or -inf"),
        (b'{"format":"ckpt/1","step":300,"attempt":"w7.3","metrics":{"a":null}}', "not a readable"),
        (b'{"format":"ckpt/1","step":300,"attempt":"w7.3","metrics":{"a":1.0,"a":2.0}}', "'a' twice"),
        (b'{"format":"ckpt/1","step":300,"attempt":"w7.2","metrics":{}}', "is of step 300 w7.2"),
        (b'{"format":"ckpt/1","step":300,"attempt":"w7.3"}', "metrics"),
    ],
)
def test_damage(raw: bytes, message: str) -> None:
    """Whatever is not such a record."""
    with pytest.raises(DamagedError, match=message):
        decode_metrics(raw, ATTEMPT, "here")


def test_another_format() -> None:
    """Said to be that, not damage."""
    with pytest.raises(UnsupportedFormatError):
        decode_metrics(b'{"format":"ckpt/2"}', ATTEMPT, "here")
