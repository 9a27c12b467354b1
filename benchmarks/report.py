"""What every benchmark prints and writes: its figures, the machine, and whether the bounds hold."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured number, and what it is compared with."""

    name: str
    value: float
    unit: str
    against: str | None = None  # the name of the figure that ``ratio`` is relative to
    ratio: float | None = None  # the median of the ratios of the pairs, not the ratio of the medians
    bound: float | None = None  # the largest ratio that --check lets pass; None: reported only

    @property
    def holds(self) -> bool | None:
        """Whether the ratio is within its bound; None where there is none."""
        return None if self.bound is None or self.ratio is None else self.ratio <= self.bound


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
        bound = {None: "", True: f"≤ {figure.bound} holds", False: f"≤ {figure.bound} BROKEN"}[figure.holds]
        table.add_row(figure.name, _amount(figure.value, figure.unit), figure.against or "", ratio, bound)
    console.print(table)


def write_json(path: Path, where: str, figures: list[Figure]) -> None:
    """The figures for programs."""
    rows = [asdict(figure) | {"holds": figure.holds} for figure in figures]
    path.write_text(json.dumps({"machine": where, "commit": commit(), "figures": rows}, indent=1) + "\n")


def broken(figures: list[Figure]) -> list[str]:
    """One sentence for every bound that does not hold."""
    return [
        f"{figure.name}: {figure.ratio:.2f} of {figure.against}, the bound is {figure.bound}"
        for figure in figures
        if figure.holds is False
    ]


def plot_bars(path: Path, title: str, groups: dict[str, dict[str, float]], unit: str) -> None:
    """A picture with one group of bars per key of ``groups``, each ``{label: value}``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    labels = list(dict.fromkeys(label for bars in groups.values() for label in bars))
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        at = [j + (i - (len(labels) - 1) / 2) * width for j, bars in enumerate(groups.values()) if label in bars]
        bars = axes.bar(at, [bars[label] for bars in groups.values() if label in bars], width, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _amount(value: float, unit: str) -> str:
    return f"{value / 1e9:.3f} GB" if unit == "bytes" else f"{value:.3f} {unit}"


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
