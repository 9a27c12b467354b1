"""A 2-rank run, killed at random moments: either rank, both, the keeper, or all of them.

12 kills by default, 50 with CKPT_KILL_POINTS=all.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ckpt
from ckpt.engine.retention import prune
from ckpt.reading.verify import verify_all
from tests.crash.random_kills import kill_again_and_again

ALL = os.environ.get("CKPT_KILL_POINTS") == "all"
ROUNDS = 50 if ALL else 12
MODES = ("rank 0", "rank 1", "keeper", "rank 0, rank 1", "keeper, rank 0, rank 1", "rank 1, keeper, rank 0")


@pytest.mark.timeout(900 if ALL else 120)
def test_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every surviving latest step is of one step on all ranks, verifies, and is never older than what was told."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    runs = [str(tmp_path / name) for name in ("one", "two")]
    with ThreadPoolExecutor() as threads:
        survivals = list(
            threads.map(lambda run, seed: kill_again_and_again(run, ROUNDS // 2, seed, MODES, 2, 0.3), runs, [2, 20])
        )
    for mode in MODES:
        count = sum(survival.rounds.get(mode, 0) for survival in survivals)
        print(f"killed {mode}: {count} times, every latest step whole")  # noqa: T201 - figures for whoever reads the output
    newest, cut_short = [s.newest for s in survivals], sum(s.cut_short for s in survivals)
    print(f"random kills {ROUNDS} of {ROUNDS}; newest steps {newest}, {cut_short} attempts cut short")  # noqa: T201 - figures for whoever reads the output
    assert sum(sum(survival.rounds.values()) for survival in survivals) == ROUNDS
    assert all(step > 0 for step in newest)
    assert cut_short > 0, "no kill fell into a save"
    for run in runs:
        steps = ckpt.steps(run)
        prune(run, grace_s=0)
        assert ckpt.steps(run) == steps
        assert all(report.ok for report in verify_all(run))
