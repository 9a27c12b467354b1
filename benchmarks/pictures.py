"""Pictures of results: bars side by side, and how values spread. Colours that colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From Okabe and Ito's palette: a family of contenders has one colour in every picture.
CKPT, PEERS, FLOOR = "#0072B2", ("#D55E00", "#F0C05A"), "#BBBBBB"
COLOURS = {"ckpt overlap": "#56B4E9", "ckpt": CKPT, "dcp": PEERS[0], "floor": FLOOR, "none": FLOOR}
INK = "#333333"
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def colour_of(label: str) -> str:
    """The colour of the family that a label begins with."""
    return next((colour for family, colour in COLOURS.items() if label.startswith(family)), PEERS[1])


def plot_bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """One panel per key of ``groups``, each ``{label: value}`` drawn as lying bars, in the order given.

    The key says the unit. Every panel has a scale of its own; a line through all of it marks a bar called ``floor``.
    """
    plt = _pyplot()
    rows = max(len(bars) for bars in groups.values())
    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(5.6 * across, (0.36 * rows + 0.9) * down + 0.6), layout="constrained", squeeze=False
    )
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for axes, (name, bars) in zip(panels.flat, groups.items(), strict=False):
        drawn = axes.barh(list(bars), list(bars.values()), color=[colour_of(label) for label in bars], height=0.72)
        axes.bar_label(drawn, [_short(value) for value in bars.values()], padding=3, fontsize=8, color=INK, bbox=PAPER)
        axes.set_ylim(rows - 0.4, -0.6)  # bars of one height in all panels
        floor = next((value for label, value in bars.items() if label.startswith("floor")), None)
        if floor is not None:
            axes.axvline(floor, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set_xlim(0, 1.16 * max(bars.values()))
        axes.set_title(name, fontsize=10, loc="left", color=INK)
        _strip(axes)
    _say(figure, title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_spread(path: Path, title: str, samples: Mapping[str, Sequence[float]], unit: str) -> None:
    """Every sample of every label as a dot, on a logarithmic axis; its median a bar, its 99th percentile a tick."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9.5, 0.62 * len(samples) + 1.5), layout="constrained")
    for row, label in enumerate(samples):
        values = sorted(samples[label])
        # Neighbours in value are set apart across the row, so that all of them are seen.
        apart = [row + 0.22 * ((i * 0.618) % 1 - 0.5) for i in range(len(values))]
        axes.scatter(values, apart, s=16, color=colour_of(label), alpha=0.65, linewidths=0)
        for value, height in ((percentile(values, 50), 0.34), (percentile(values, 99), 0.2)):
            axes.plot([value, value], [row - height, row + height], color=INK, linewidth=1.6)
        middle = percentile(values, 50)
        axes.annotate(_short(middle), (middle, row - 0.36), ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_yticks(range(len(samples)), list(samples))
    axes.set_ylim(len(samples) - 0.45, -0.7)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.xaxis.set_minor_formatter(lambda value, _: _short(value) if f"{value:.0e}"[0] in "25" else "")
    axes.tick_params(axis="x", which="minor", labelsize=9, labelcolor=INK)
    axes.set_xlabel(f"{unit} (logarithmic); tall mark: median, short mark: 99th percentile", fontsize=9, color=INK)
    _strip(axes)
    _say(figure, title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


VERDICT_COLOURS = ("#009E73", "#56B4E9", "#F0E442", "#E69F00", "#D55E00", "#CC3311", "#882255", "#999999")


def plot_verdicts(path: Path, title: str, rows: Mapping[str, Mapping[str, str]], verdicts: Sequence[str]) -> None:
    """A table of words, coloured by the word: one row per key of ``rows``, one column per key of its values."""
    plt = _pyplot()
    columns = list(next(iter(rows.values())))
    figure, axes = plt.subplots(figsize=(1.9 * len(columns) + 2.6, 0.34 * len(rows) + 1.4), layout="constrained")
    colours = dict(zip(verdicts, VERDICT_COLOURS, strict=True))
    for y, (_, cells) in enumerate(rows.items()):
        for x, column in enumerate(columns):
            word = cells[column]
            axes.add_patch(
                plt.Rectangle((x + 0.02, y + 0.06), 0.96, 0.88, color=colours[word], alpha=0.85, linewidth=0)
            )
            axes.text(x + 0.5, y + 0.52, word, ha="center", va="center", fontsize=8.5, color="#111111")
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    _say(figure, title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of ``values`` that at least ``percent`` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__floor__() - 1)]


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _strip(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.grid(axis="x", color="#E8E8E8", linewidth=0.8)
    axes.set_axisbelow(True)


def _say(figure: Any, title: str) -> None:
    head, _, where = title.partition("\n")
    figure.suptitle(head, fontsize=12, x=0.01, ha="left", color=INK)
    if where:
        figure.supxlabel(where, fontsize=7, x=0.01, ha="left", color="#777777")


def _short(value: float) -> str:
    return f"{value:.3g}"
