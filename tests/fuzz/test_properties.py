"""Any bytes, and records altered node by node: each parser takes them or raises a CkptError."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, attempt, mutate

# The same examples each time; as many as a few seconds allow. `make fuzz` looks further.
LIKE_ALWAYS = settings(
    deadline=None, derandomize=True, database=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted(name: str):
    """What ckpt writes is read; else what is altered would be refused for another reason."""
    target = TARGETS[name]
    assert any(attempt(target, raw) == "" for raw in target.seeds())


@pytest.mark.parametrize("name", TARGETS)
@LIKE_ALWAYS
@given(raw=st.binary(max_size=300))
def test_any_bytes(name: str, raw: bytes):
    """Nothing but CkptErrors come out."""
    attempt(TARGETS[name], raw)


@pytest.mark.parametrize("name", TARGETS)
@LIKE_ALWAYS
@given(data=st.data())
def test_altered_records(name: str, data: st.DataObject):
    """A seed with one to three of its nodes altered, as JSON, msgpack or bytes."""
    target = TARGETS[name]
    seeds = sorted(target.seeds(), key=len)[:12]
    raw = data.draw(st.sampled_from(seeds))
    altered = mutate(target, raw, lambda n: data.draw(st.integers(0, n - 1)))
    attempt(target, altered)
