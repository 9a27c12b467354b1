"""The benchmark itself, in small: it runs, checks what it reads against what it wrote, and reports as promised."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one small run has left its results."""
    folder = tmp_path_factory.mktemp("bench")
    command = [f"{sysconfig.get_path('scripts')}/torchrun", "--standalone", "--nproc-per-node=2"]
    command += ["benchmarks/save_load.py", "--gigabytes=0.02", "--pairs=2", f"--dir={folder / 'work'}"]
    command += [f"--json={folder / 'out.json'}", f"--plot={folder / 'out.png'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pair 2 of 2" in done.stdout
    return folder


def test_figures(folder: Path):
    """Every figure has its seven fields; the compared ones have a ratio that is their own."""
    found = json.loads((folder / "out.json").read_text())
    assert found.keys() == {"machine", "commit", "figures"}
    names = {figure["name"] for figure in found["figures"]}
    assert {"state", "ckpt stall", "ckpt durable save", "ckpt cold load", "ckpt warm load", "floor copy"} <= names
    for figure in found["figures"]:
        assert list(figure) == ["name", "value", "unit", "against", "ratio", "bound", "holds"]
        assert figure["value"] > 0
        assert (figure["ratio"] is None) == (figure["against"] is None)
        assert figure["against"] is None or figure["against"] in names
        assert (figure["holds"] is None) == (figure["bound"] is None)
        if figure["bound"] is not None:
            assert figure["holds"] == (figure["ratio"] <= figure["bound"])


def test_picture_and_nothing_else_left(folder: Path):
    """The picture is a PNG, and the folder it worked in is gone."""
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png"]
