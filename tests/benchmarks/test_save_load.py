"""The benchmark in small: it runs, checks what it reads against what it wrote, and reports as promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.running import bounds, run_small


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_small_run(tmp_path: Path):
    """Every bound is judged, every peer that is here is measured and the others are named."""
    figures, output = run_small(tmp_path, "save_load.py", "--pairs=1")
    assert "pair 1 of 1" in output
    assert bounds(figures) == {
        ("ckpt stall", "dcp async stall"): 0.7,
        ("ckpt stall", "floor copy"): 1.15,
        ("ckpt stall, first", "ckpt stall, third"): 1.5,
        ("ckpt durable save", "dcp save"): 0.6,
        ("ckpt durable save", "floor write"): 1.25,
        ("ckpt cold load", "floor cold read"): 1.2,
        ("ckpt cold load", "dcp cold load"): 0.9,
        ("ckpt warm load", "dcp warm load"): 0.7,
        ("ckpt bytes written", "unique bytes"): 1.01,
        ("ckpt bytes read", "bytes needed"): 1.01,
        ("ckpt most bytes of a rank, FSDP", "mean bytes of a rank, FSDP"): 1.1,
        ("ckpt most bytes of a rank, DDP", "mean bytes of a rank, DDP"): 1.1,
    }
    value = {figure["name"]: figure["value"] for figure in figures}
    assert all(number > 0 for number in value.values())
    assert value["ckpt bytes written"] >= value["unique bytes"] == value["state"]
    assert value["ckpt bytes read"] >= value["bytes needed"] >= value["state"]
    for peer in ("dcp save", "dcp process stall", "torch.save save, os.sync", "safetensors cold load"):
        assert peer in value
    for package, figure in {
        "torchsnapshot": "torchsnapshot save",
        "fastsafetensors": "fastsafetensors cold load",
        "runai-model-streamer": "run:ai streamer cold load",
    }.items():
        assert (figure in value) != (f"{package}: not installed" in output)


def test_figures():
    """Ratios are medians of the rounds' ratios; the cold floor is the best of its kinds in each round."""
    from save_load import ROWS, figures

    def round_of(seconds: float, cold: float) -> dict[str, float]:
        names = {name for row in ROWS for name in (row.figure, row.against)} - {"floor cold read"}
        same = dict.fromkeys(names, seconds)
        return same | {
            "dcp walk": 0.5,
            "ckpt cold load": cold,
            "read direct": 4.0,
            "read direct twice": 2.0,
            "read buffered": 3.0,
        }

    first = [
        {"first": 3.0, "steady": 2.0, "step": 1.0},
        {"first": 8.0, "steady": 2.0, "step": 1.0},
        {"first": 1.0, "steady": 2.0, "step": 1.0},
    ]
    found = figures([round_of(1.0, 2.0), round_of(2.0, 6.0), round_of(4.0, 3.0)], first)
    by_pair = {(figure.name, figure.against): figure for figure in found}
    assert by_pair["ckpt stall", "dcp async stall"].ratio == 1.0
    assert by_pair["ckpt stall", "dcp async stall"].value == 2.0
    assert by_pair["ckpt stall", "dcp async stall"].holds is False
    cold = by_pair["ckpt cold load", "floor cold read"]
    assert (cold.value, cold.ratio, cold.holds) == (3.0, 1.5, False)  # medians of 2, 6, 3 and of 2/2, 6/2, 3/2
    assert by_pair["floor cold read", None].value == 2.0
    assert by_pair["ckpt stall, first", "ckpt stall, third"].ratio == 1.5
    assert by_pair["ckpt stall, first", "ckpt stall, third"].holds is True
    assert by_pair["dcp async stall without its walk", None].value == 1.5
    assert ("read direct", None) not in by_pair
