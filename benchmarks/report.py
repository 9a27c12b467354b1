"""What every benchmark has in common: its options, its figures, the machine, and whether the bounds hold."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured number, what it is compared with, and the most that it may be."""

    name: str
    value: float
    unit: str
    against: str | None = None  # the name of the figure that ``ratio`` is relative to
    ratio: float | None = None  # the median of the ratios of the pairs, not the ratio of the medians
    bound: float | None = None  # the largest ratio that --check lets pass; without a ratio, the largest value

    @property
    def holds(self) -> bool | None:
        """Whether the ratio (without one: the value) is within its bound; None where there is none."""
        if self.bound is None:
            return None
        return (self.value if self.ratio is None else self.ratio) <= self.bound


def options(description: str | None, *, pairs: bool = True) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: --quick, --json, --plot, --check, and --pairs where there are some."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and short, under 50 s")
    if pairs:
        parser.add_argument("--pairs", type=int, help="counted rounds (default 5; with --quick 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound does not hold")
    return parser


def finish(
    args: argparse.Namespace, title: str, where: str, figures: list[Figure], draw: Callable[[Path, str], object]
) -> int:
    """Print and write the figures and the picture as ``args`` ask; the exit code, 1 if --check finds a broken bound.

    ``draw(path, title)`` makes the picture; the title has a second line that says where it was measured.
    """
    show(title, where, figures)
    if args.json:
        write_json(args.json, where, figures)
    if args.plot:
        draw(args.plot, f"{title}\n{where}")
    for sentence in broken(figures):
        print(f"broken bound: {sentence}", file=sys.stderr)
    return int(args.check and bool(broken(figures)))


def machine(folder: Path) -> str:
    """Processor, cores, memory, file system of ``folder``, and the versions that matter, in one line."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    kernel = platform.release().split("-")[0]
    return (
        f"{cpu}, {cores} cores, {memory_gib:.0f} GiB, {_file_system(folder)}, Linux {kernel}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def commit() -> str | None:
    """The project's commit, marked when the tree has changes; None outside a git checkout."""
    root = Path(__file__).parent.parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def show(title: str, where: str, figures: list[Figure]) -> None:
    """A table of the figures for people."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(title=title, caption=where, title_justify="left", caption_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("against")
    table.add_column("ratio", justify="right")
    table.add_column("bound", justify="right")
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        unit = "" if figure.ratio is not None else figure.unit
        bound = "" if figure.bound is None else f"≤ {_amount(figure.bound, unit)}"
        verdict = {None: "", True: " holds", False: " BROKEN"}[figure.holds]
        table.add_row(figure.name, _amount(figure.value, figure.unit), figure.against or "", ratio, bound + verdict)
    console.print(table)


def write_json(path: Path, where: str, figures: list[Figure]) -> None:
    """The figures for programs."""
    rows = [asdict(figure) | {"holds": figure.holds} for figure in figures]
    path.write_text(json.dumps({"machine": where, "commit": commit(), "figures": rows}, indent=1) + "\n")


def broken(figures: list[Figure]) -> list[str]:
    """One sentence for every bound that does not hold."""
    return [
        f"{figure.name}: {_amount(figure.value, figure.unit)}, the bound is {_amount(figure.bound or 0, figure.unit)}"
        if figure.ratio is None
        else f"{figure.name}: {figure.ratio:.2f} of {figure.against}, the bound is {figure.bound}"
        for figure in figures
        if figure.holds is False
    ]


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        scale, unit = next(
            (pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if value >= pair[0]), (1.0, "bytes")
        )
        return f"{value / scale:.4g} {unit}"
    return f"{value:.3f} {unit}" if unit else f"{value:g}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _file_system(folder: Path) -> str:
    """The type of the file system that holds ``folder``: the longest mount point above it."""
    found, longest = "unknown file system", -1
    for line in _lines("/proc/mounts"):
        _, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) > longest:
            found, longest = kind, len(mount)
    return found
