"""The scoreboard, in small: verdicts come from what a restart really has, and the record is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.running import ROOT, figures_of


def test_small_run(tmp_path: Path) -> None:
    """A missing shard and a changed state: ckpt goes back or is right; a plain file for each rank is not found."""
    command = [sys.executable, "benchmarks/faults.py", "--quick", "--mb=1", "--against=torch", "--check"]
    command += [f"--dir={tmp_path}", f"--json={tmp_path / 'out.json'}", f"--plot={tmp_path / 'out.png'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "out.json").read_text())
    found = {(row["fault"], row["system"]): row["verdict"] for row in record.pop("verdicts")}
    (tmp_path / "plain.json").write_text(json.dumps(record))
    assert found["a shard missing", "ckpt"] == "survived"
    assert found["a shard missing", "torch.save"] == "survived"  # of step 1: the newest with a file of every rank
    assert found["state changed after save", "ckpt"] == "survived"
    figures = {figure["name"]: figure for figure in figures_of(tmp_path / "plain.json")}
    assert figures["ckpt: silently wrong"]["value"] == 0
    for system in ("ckpt", "ckpt parity=1", "torch.save"):
        counted = sum(figure["value"] for name, figure in figures.items() if name.startswith(f"{system}: "))
        assert counted == len([fault for fault, name in found if name == system])


def test_a_verdict_is_what_a_restart_has() -> None:
    """Whole, old, mixed, wrong, and told in words that name something or nothing."""
    code = """
import sys; sys.path.insert(0, "benchmarks")
from fault_jobs import Outcome
from faults import judge

def ranks(*values): return [Outcome("returned", [list(v) for v in value], "") for value in values]

print(judge(ranks([[20.0]], [[21.0]]), {2}, ()).verdict)
print(judge(ranks([[10.0]], [[11.0]]), {2}, ()).verdict)
print(judge(ranks([[20.0], [10.0]], [[21.0], [21.0]]), {1, 2}, ()).verdict)
print(judge(ranks([[21.0]], [[20.0]]), {2}, ()).verdict)
print(judge(ranks([[20.0, 20.5]], [[21.0]]), {2}, ()).verdict)
print(judge(ranks([[float("nan")]], [[21.0]]), {2}, ()).verdict)
print(judge([Outcome("raised", "OSError: shard.bin is short", "")], {2}, ["shard.bin"]).verdict)
print(judge([Outcome("raised", "EOFError", "")], {2}, ["shard.bin"]).verdict)
print(judge([Outcome("hung", "nothing", ""), Outcome("raised", "EOFError", "")], {2}, ()).verdict)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    expected = ["survived", "lost", "mixed", *["silently wrong"] * 3, "refused clearly", "refused obscurely", "hung"]
    assert done.stdout.splitlines() == expected
