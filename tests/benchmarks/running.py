"""A benchmark, run small: what every one of them promises."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIELDS = ["name", "value", "unit", "against", "ratio", "bound", "holds"]


def run_small(folder: Path, script: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """(figures, output) of one run on two ranks; its JSON and picture are checked, and that nothing else is left."""
    command = [f"{sysconfig.get_path('scripts')}/torchrun", "--standalone", "--nproc-per-node=2"]
    command += [f"benchmarks/{script}", "--size=tiny", f"--dir={folder / 'work'}", *arguments]
    command += [f"--json={folder / 'out.json'}", f"--plot={folder / 'out.png'}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png"]
    return figures_of(folder / "out.json"), done.stdout


def figures_of(path: Path) -> list[dict[str, Any]]:
    """The figures of a JSON record, each with its seven fields, which agree with each other."""
    found = json.loads(path.read_text())
    assert found.keys() == {"machine", "commit", "figures"}
    names = {figure["name"] for figure in found["figures"]}
    for figure in found["figures"]:
        assert list(figure) == FIELDS
        assert (figure["ratio"] is None) == (figure["against"] is None)
        assert figure["against"] is None or figure["against"] in names, figure
        assert (figure["holds"] is None) == (figure["bound"] is None)
        if figure["bound"] is not None:
            judged = figure["value"] if figure["ratio"] is None else figure["ratio"]
            assert figure["holds"] == (judged <= figure["bound"])
    return found["figures"]


def bounds(figures: list[dict[str, Any]]) -> dict[tuple[str, str | None], float]:
    """``{(name, against): bound}`` of the figures that have one."""
    return {(f["name"], f["against"]): f["bound"] for f in figures if f["bound"] is not None}
