"""What an accident cost: read from the events of the run that had it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rich.table import Table

from trainer.demo.course import Course
from trainer.journal import read_events

__all__ = ["Cost", "cost_table", "reckon"]


@dataclass(frozen=True)
class Cost:
    """What the accident cost, from the events of the run that had it."""

    killed_at: int
    restored: int
    killed_at_s: float  # wall clock, as are the two below
    begun_at_s: float
    first_step_at_s: float
    first_stalls_s: tuple[float, ...]  # of the first save after each start, which makes the keeper and its memory
    stalls_s: tuple[float, ...]  # of all others
    nbytes: tuple[int, ...]  # one per save, all ranks together

    @property
    def steps_lost(self) -> int:
        """How many steps were done a second time."""
        return self.killed_at - self.restored

    @property
    def restart_s(self) -> float:
        """From the kill to the end of the first step that the restarted job did."""
        return self.first_step_at_s - self.killed_at_s


def reckon(course: Course) -> Cost:
    """Read the cost from the events: rank 0 stalls with the others, bytes are those of all ranks."""
    events = read_events(course.events)
    killed = next(event for event in events if event["event"] == "killed")
    begun = next(e for e in events if e["event"] == "begin" and e["restored_step"] is not None)
    first_step = next(e for e in events if e["event"] == "step" and e["time_s"] > begun["time_s"])
    first: list[float] = []
    others: list[float] = []
    stalls = others
    for event in events:
        if event["event"] == "begin":
            stalls = first
        elif event["event"] == "save" and event["rank"] == 0:
            stalls.append(event["stall_s"])
            stalls = others
    nbytes: dict[int, int] = {}
    for event in events:
        if event["event"] == "commit" and event["time_s"] > begun["time_s"]:  # the dead rank told of none of its own
            nbytes[event["step"]] = nbytes.get(event["step"], 0) + event["nbytes"]
    return Cost(
        killed_at=killed["step"],
        restored=begun["restored_step"],
        killed_at_s=killed["time_s"],
        begun_at_s=begun["time_s"],
        first_step_at_s=first_step["time_s"],
        first_stalls_s=tuple(first),
        stalls_s=tuple(others),
        nbytes=tuple(nbytes.values()),
    )


def cost_table(cost: Cost) -> Table:
    """The cost as a person reads it."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_row("steps lost, and done again", f"{cost.steps_lost}  ({cost.restored + 1} to {cost.killed_at})")
    table.add_row("from the kill to the end of the first new step", f"{cost.restart_s:.1f} s")
    table.add_row("  of it: start the processes, read the step", f"{cost.begun_at_s - cost.killed_at_s:.1f} s")
    table.add_row("  of it: the first step itself", f"{cost.first_step_at_s - cost.begun_at_s:.1f} s")
    if cost.stalls_s:
        table.add_row("training waited per save (median)", f"{median(cost.stalls_s) * 1000:.0f} ms")
    table.add_row("  for the first save after a start", f"{median(cost.first_stalls_s) * 1000:.0f} ms")
    table.add_row("bytes per save, both ranks", f"{median(cost.nbytes) / 1e6:.1f} MB")
    return table
