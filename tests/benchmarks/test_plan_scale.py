"""The benchmark itself, in small: it plans for every rank it looks at, checks the sums, and reports as promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one small run has left its results."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "benchmarks/plan_scale.py", "--worlds", "8", "32", "--layers=2", "--repeats=1"]
    command += [f"--json={folder / 'out.json'}", f"--plot={folder / 'out.png'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_figures(folder: Path):
    """Each way of holding the state in each world, and one load; what is no matter of speed holds."""
    found = json.loads((folder / "out.json").read_text())
    assert found.keys() == {"machine", "commit", "figures"}
    figures = {(figure["name"], figure["against"]): figure for figure in found["figures"]}
    assert len(figures) == len(found["figures"])
    for scheme in ("FSDP", "HSDP", "DDP"):
        for world in (8, 32):
            name = f"{scheme}, {world} ranks"
            for what in ("plan", "own part", "part", "layout", "COMMIT"):
                assert figures[f"{what}: {name}", None]["value"] > 0
            for what in ("max / mean", "written / unique"):
                figure = figures[f"{what}: {name}", None]
                assert 1 <= figure["value"] <= figure["bound"]
                assert figure["holds"] is True
        growth = figures[f"own part: {scheme}, 32 ranks", f"own part: {scheme}, 8 ranks"]
        assert growth["ratio"] == pytest.approx(
            growth["value"] / figures[f"own part: {scheme}, 8 ranks", None]["value"]
        )
    assert figures["plan of a load: FSDP, 32 to 24 ranks", None]["value"] > 0
    assert 1 <= figures["parts read: FSDP, 32 to 24 ranks", None]["value"] <= 32
    assert figures["index read: FSDP, 32 to 24 ranks", None]["value"] > figures["part: FSDP, 32 ranks", None]["value"]


def test_picture_and_nothing_else_left(folder: Path):
    """The picture is a PNG."""
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png"]
