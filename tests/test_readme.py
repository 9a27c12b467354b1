"""What README.md shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ckpt

README = (Path(__file__).parent.parent / "README.md").read_text()


def example() -> str:
    """The first python block."""
    found = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_runs_and_resumes(tmp_path: Path):
    """The example trains to its last step as written; run again it finds nothing left to do."""
    (tmp_path / "train.py").write_text(example())
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "latest step: 50\n"
    assert ckpt.steps(tmp_path / "run") == [30, 40, 50]


def test_the_example_is_short():
    """Fifteen lines, as promised."""
    assert len(example().splitlines()) <= 15


def test_files_that_are_named_exist():
    """Every relative link leads somewhere."""
    root = Path(__file__).parent.parent
    pages = [root / "README.md", root / "docs" / "architecture.md", root / "benchmarks" / "README.md"]
    dead = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []
