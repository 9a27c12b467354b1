"""A picture of values that should not grow, and of how much of each bound is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # of Okabe and Ito's palette
INK = "#333333"


def plot_limits(
    path: Path,
    title: str,
    lines: Mapping[str, Mapping[int, float]],
    says: tuple[str, str, float],
    used: Mapping[str, float],
) -> None:
    """Lines, each ``{size: value}``, over a logarithmic axis; beside them how much of each bound is ``used`` (1: all).

    ``says`` is what the sizes are, what the values are, and the largest value allowed. Lines whose labels differ in
    what stands before their first comma are drawn alike but for their dashes.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained", width_ratios=(3, 2))
    sizes_are, values_are, limit = says
    of = list(dict.fromkeys(label.partition(", ")[2] for label in lines))
    kinds = list(dict.fromkeys(label.partition(", ")[0] for label in lines))
    for label, values in lines.items():
        kind, _, what = label.partition(", ")
        style = ("-", ":", "--")[kinds.index(kind) % 3]
        colour = COLOURS[of.index(what)]
        left.plot(list(values), list(values.values()), style, color=colour, marker="o", markersize=4, label=label)
    sizes = sorted({size for values in lines.values() for size in values})
    left.axhline(limit, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    left.annotate("allowed", (sizes[0], limit), (0, 2), textcoords="offset points", fontsize=8, color=INK)
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [f"{size:,}" for size in sizes])
    left.set_ylim(0, 1.15 * max(limit, *(max(values.values()) for values in lines.values())))
    left.set_xlabel(sizes_are, fontsize=9, color=INK)
    left.set_title(values_are, fontsize=10, loc="left", color=INK)
    left.legend(fontsize=8, frameon=False, ncols=len(kinds), loc="upper left", bbox_to_anchor=(0, 0.84))
    bars = right.barh(list(used), list(used.values()), color=COLOURS[0], height=0.62)
    right.bar_label(bars, [f"{part:.2g}" for part in used.values()], padding=3, fontsize=8, color=INK)
    right.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    right.set_xlim(0, max(1.16, *(1.16 * part for part in used.values())))
    right.invert_yaxis()
    right.set_title("used of what is allowed", fontsize=10, loc="left", color=INK)
    for axes in (left, right):
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, labelsize=9, labelcolor=INK)
        axes.grid(axis="y" if axes is left else "x", color="#E8E8E8", linewidth=0.8)
        axes.set_axisbelow(True)
    head, _, where = title.partition("\n")
    figure.suptitle(head, fontsize=12, x=0.01, ha="left", color=INK)
    figure.supxlabel(where, fontsize=7, x=0.01, ha="left", color="#777777")
    figure.savefig(path, dpi=120)
    plt.close(figure)
