"""Stalls in small, and the arithmetic of their distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.running import bounds, run_small


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_small_run(tmp_path: Path):
    """Median, 99th percentile and longest stall of every kind of save."""
    figures, output = run_small(tmp_path, "stall.py", "--saves=2")
    assert "save 2 of 2" in output
    assert bounds(figures) == {("ckpt overlap stall, p50", "dcp async stall, p50"): 0.05}
    value = {figure["name"]: figure["value"] for figure in figures}
    for kind in ("ckpt", "ckpt overlap", "dcp async", "dcp process", "floor copy"):
        assert 0 < value[f"{kind} stall, p50"] <= value[f"{kind} stall, p99"] <= value[f"{kind} stall, max"]


def test_figures():
    """Ratios are of saves in the same round, though a kind be made in fewer rounds."""
    from stall import figures

    samples = {
        "ckpt": {1: 2.0, 2: 4.0, 3: 6.0},
        "ckpt overlap": {1: 0.1, 2: 0.2, 3: 0.9},
        "dcp async": {1: 10.0, 2: 5.0, 3: 10.0},
        "dcp process": {1: 7.0},
        "floor copy": {1: 2.0, 2: 2.0, 3: 4.0},
    }
    found = {(figure.name, figure.against): figure for figure in figures(1000, samples)}
    overlap = found["ckpt overlap stall, p50", "dcp async stall, p50"]
    assert (overlap.value, overlap.ratio, overlap.holds) == (0.2, 0.04, True)
    assert found["ckpt stall, p50", "floor copy stall, p50"].ratio == 1.5
    assert found["ckpt stall, max", None].value == 6.0
    assert found["dcp process stall, p99", None].value == 7.0


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (50, 50.0), (50.5, 51.0), (99, 99.0), (99.5, 100.0), (100, 100.0)]
)
def test_percentile(percent: float, expected: float):
    """The nearest rank: a value that was measured, never one in between."""
    from pictures import percentile

    assert percentile([float(n) for n in range(100, 0, -1)], percent) == expected
