"""The picture of the demonstration: what the accident did to the losses, and to the clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.demo.cost import Cost
from trainer.demo.course import Course
from trainer.journal import read_events, read_losses

__all__ = ["draw"]


def draw(path: Path, peace: Course, accident: Course, cost: Cost, *, same: bool) -> None:
    """Two panels: the losses over the steps, and the steps over the time, of both runs."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    calm, shock, ink, grey = "#9ecae1", "#d62728", "#1f3b57", "#7f7f7f"
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), layout="constrained", height_ratios=(3, 2))

    kept = {step: float.fromhex(loss) for step, loss in read_losses(peace.losses).items()}
    lost = {step: float.fromhex(loss) for step, loss in read_losses(accident.losses).items()}
    saves = [step for step in kept if step % peace.every == 0 or step == peace.steps]
    above.axvspan(cost.restored + 0.5, cost.killed_at + 0.5, color="#fdd0a2", alpha=0.5, lw=0, label="done twice")
    above.plot(list(kept), list(kept.values()), color=calm, lw=7, solid_capstyle="round", label="in peace")
    above.plot(list(lost), list(lost.values()), color=ink, lw=1.4, marker="o", ms=3, label="killed and restarted")
    above.plot(saves, [kept[s] for s in saves], "D", color="white", mec=ink, ms=7, label="step saved")
    above.plot(
        cost.killed_at, lost[cost.killed_at], "X", color=shock, ms=13, mec="white", label="rank killed", zorder=5
    )
    above.annotate(
        f"restarted from step {cost.restored}",
        xy=(cost.restored, lost[cost.restored]),
        xytext=(cost.killed_at, lost[cost.restored] + 0.22 * (max(kept.values()) - min(kept.values()))),
        arrowprops={"arrowstyle": "-|>", "color": shock, "connectionstyle": "arc3,rad=0.25"},
        color=shock,
        ha="center",
    )
    above.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, peace.steps + 1))
    verdict = "the losses are the same, bit for bit" if same else "THE LOSSES DIFFER"
    above.set_title(f"One rank of two was killed between two saves; {verdict}", loc="left", weight="bold")
    above.legend(frameon=False)

    for course, colour, width, label in ((peace, calm, 7.0, "in peace"), (accident, ink, 1.4, "killed and restarted")):
        for times, steps, first in _stretches(course):
            below.plot(times, steps, color=colour, lw=width, solid_capstyle="round", label=label if first else None)
    origin = _begin_s(accident)
    saved = [event for event in read_events(accident.events) if event["event"] == "save" and event["rank"] == 0]
    when = [event["time_s"] - origin for event in saved]
    below.plot(when, [event["step"] for event in saved], "D", color="white", mec=ink, ms=6, zorder=4)
    down, up = cost.killed_at_s - origin, cost.first_step_at_s - origin
    below.axvspan(down, up, color="#fcbba1", alpha=0.5, lw=0)
    below.plot(down, cost.killed_at, "X", color=shock, ms=13, mec="white", zorder=5)
    below.plot([down, up], [cost.killed_at, cost.restored + 1], ls=":", color=shock, lw=1.2)
    below.annotate(
        f"{cost.restart_s:.1f} s from the kill\nto the end of step {cost.restored + 1}",
        xy=((down + up) / 2, peace.steps * 0.12),
        ha="center",
        color=shock,
    )
    below.axhline(cost.restored, color=grey, lw=0.7, ls="--", zorder=0)
    below.text(0.1, cost.restored, f"step {cost.restored}, the last one committed", color=grey, va="bottom", size=9)
    below.set(
        xlabel="seconds since the first job began to train",
        ylabel="steps done",
        xlim=(0, None),
        ylim=(0, peace.steps + 2),
    )
    below.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _begin_s(course: Course) -> float:
    return float(next(event["time_s"] for event in read_events(course.events) if event["event"] == "begin"))


def _stretches(course: Course) -> Iterator[tuple[list[float], list[int], bool]]:
    """Times and steps of each start of a course's job: (seconds since the first began, steps, is it the first)."""
    origin = _begin_s(course)
    times: list[float] = []
    steps: list[int] = []
    first = True
    for event in read_events(course.events):
        if event["event"] == "begin":
            if times:
                yield times, steps, first
                first = False
            times, steps = [event["time_s"] - origin], [event["restored_step"] or 0]
        elif event["event"] == "step":
            times.append(event["time_s"] - origin)
            steps.append(event["step"])
    yield times, steps, first
