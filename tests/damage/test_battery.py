"""Every damage to every file of a step: found and named, never loaded, repaired where the bytes are somewhere.

``make damage`` runs all of them; ``make test`` each third, other ones of each way to store a step.
"""

from __future__ import annotations

import os

import pytest

from tests.damage.battery import run_battery
from tests.damage.kinds import Kind

KINDS = [Kind(world, encoding, parity) for world in (1, 2) for encoding in ("raw", "zstd") for parity in (True, False)]
SHARE = 1 if os.environ.get("CKPT_DAMAGE") == "all" else 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", range(len(KINDS)), ids=lambda place: str(KINDS[place]).replace(", ", "-"))
def test_damage(quick, tmp_path, record_property, place):
    """verify names it with exit code 4; a load refuses, falls back or repairs; `ckpt repair` gives every byte back."""
    done, known, outcomes = run_battery(tmp_path, KINDS[place], lambda number: number % SHARE == place % SHARE)
    assert done >= known // SHARE
    what = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    record_property("told", f"damage {done} of {done} (there are {known}; {KINDS[place]}): {what}")
