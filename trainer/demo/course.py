"""One course of the demonstration: a job of two ranks, its folder, its command, and watching it run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from trainer.journal import read_events

__all__ = ["RANKS", "Course", "start"]

RANKS = 2
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Course:
    """One of the two runs: its folder holds the run, the logs, and what the workers printed."""

    name: str
    folder: Path
    steps: int
    every: int
    fault: tuple[str, ...] = ()

    @property
    def run(self) -> Path:
        """Where the steps are kept."""
        return self.folder / "run"

    @property
    def losses(self) -> Path:
        """The loss log."""
        return self.folder / "losses.jsonl"

    @property
    def events(self) -> Path:
        """The log of events with their times."""
        return self.folder / "events.jsonl"

    @property
    def printed(self) -> Path:
        """What the launcher and the workers printed."""
        return self.folder / "job.log"

    @property
    def command(self) -> list[str]:
        """The very same command starts the job and resumes it."""
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        # The job has the same name at both starts, so the second meets the keeper that outlived the first.
        job = f"ckpt-demo-{self.name}-{os.getpid()}"
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", job]
        launcher += ["--nproc-per-node", str(RANKS), "--shutdown-timeout", "5"]
        trainer = ["--run", str(self.run), "--steps", str(self.steps), "--every", str(self.every), "--keep", "10"]
        trainer += ["--parallel", "fsdp", "--dropout", "0.1", "--device", "cpu"]
        trainer += ["--loss-log", str(self.losses), "--events", str(self.events), *self.fault]
        return [*launcher, "-m", "trainer", "--", *trainer]


def start(course: Course, console: Console) -> int:
    """Start the job of a course, show its progress until it has ended, and return its exit code."""
    course.folder.mkdir(parents=True, exist_ok=True)
    seen = len(read_events(course.events))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CKPT_LINGER_S": "30"}
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        course.printed.open("a", encoding="utf-8") as log,
        _process(course.command, log, environment) as job,
        Progress(*columns, console=console, transient=not console.is_terminal) as progress,
    ):
        task = progress.add_task("starting", total=course.steps)
        while True:
            code = job.poll()  # asked before the events are read, so that none is missed
            events = read_events(course.events)
            for event in events[seen:]:
                _show(event, progress, task)
            seen = len(events)
            if code is not None:
                return code
            time.sleep(0.05)


@contextmanager
def _process(command: list[str], log: IO[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive the block, however the block is left."""
    child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _show(event: dict[str, Any], progress: Progress, task: TaskID) -> None:
    match event["event"]:
        case "step":
            progress.update(task, completed=event["step"], description=f"loss {event['loss']:.3f}")
        case "begin" if event["restored_step"] is not None:
            progress.console.print(f"  restored step {event['restored_step']}")
        case "save" if event["rank"] == 0:
            progress.console.print(f"  step {event['step']} saved: training waited {event['stall_s'] * 1000:.0f} ms")
        case "killed":
            progress.console.print(f"  [red]rank {event['rank']} gets SIGKILL at the end of step {event['step']}")
