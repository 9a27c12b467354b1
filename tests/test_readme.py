"""What README.md shows is what happens."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def example() -> str:
    """The first python block."""
    found = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.timeout(300)  # a dozen programs, three of which import torch
def test_example_and_command_line(tmp_path: Path):
    """The example runs as written, and every command prints what stands below it (times, hosts, digests aside)."""
    (tmp_path / "train.py").write_text(example())
    assert "\n$ python train.py\n" in README
    environment = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    for block in re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        for entry in block.removeprefix("$ ").split("\n$ "):
            command, _, expected = entry.partition("\n")
            done = subprocess.run(
                command,
                shell=True,
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=100,
            )
            assert steady(done.stdout, str(tmp_path)) == steady(expected, "/tmp/example"), command


def steady(text: str, folder: str) -> list[str]:
    """Lines of words without what differs between two runs or machines."""
    text = text.replace(folder, "FOLDER").replace(f" {socket.gethostname()} ", " vm ")
    for pattern in (
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",  # when
        r"\b[0-9a-f]{32}\b",  # digests
        r"(?<=process )\d+( on \S+( \(pid \d+\))?)?",
        r"\d+\.\d+ kB",  # files with random states as JSON
        r"(?<=in )\d+\.\d+(?= s)",
        "─+",
    ):
        text = re.sub(pattern, "…", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_example_is_short():
    """Fifteen lines, as promised."""
    assert len(example().splitlines()) <= 15


def test_the_measured_numbers_are_the_recorded_ones():
    """The table of measurements says what the files in benchmarks/results say."""
    figures = [
        figure
        for name in ("save_load", "stall")
        for figure in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"]
    ]
    value = {figure["name"]: f"{figure['value']:.3g}" for figure in figures}
    ratio = {(figure["name"], figure["against"]): f"{figure['ratio']:.2f}" for figure in figures if figure["against"]}

    def row(name: str, ours: str, theirs: str, what: str, floor: str | None) -> str:
        against_floor = ("", "") if floor is None else (f"{value[floor]} s", ratio[ours, floor])
        cells = (name, f"{value[ours]} s", f"{value[theirs]} s ({what})", ratio[ours, theirs], *against_floor)
        return f"| {' | '.join(cells)} |"

    expected = [
        row("stall per save", "ckpt stall", "dcp async stall", "`async_save`", "floor copy"),
        row("stall with `overlap`", "ckpt overlap stall, p50", "dcp async stall, p50", "`async_save`", None),
        row("durable save", "ckpt durable save", "dcp save", "`save`", "floor write"),
        row("cold load", "ckpt cold load", "dcp cold load", "`load`", "floor cold read"),
        row("warm load", "ckpt warm load", "dcp warm load", "`load`", None),
        f"A job's first save stalled {value['ckpt stall, first']} s, its third {value['ckpt stall, third']} s.",
    ]
    missing = [line for line in expected if line not in README]
    assert not missing, "\n".join(["README.md should say:", *missing])


def test_files_that_are_named_exist():
    """Every relative link leads somewhere."""
    pages = [ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "benchmarks" / "README.md"]
    dead = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []
