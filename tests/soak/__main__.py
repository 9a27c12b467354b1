"""``python -m tests.soak``: two ranks save to storage that fails, and are killed and restarted at random."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.soak.supervising import Soak


def main() -> int:
    """Soak, print what there was, and give 1 when something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between saves")
    parser.add_argument("--calm-s", type=float, default=10.0, help="the longest time between two kills, mostly")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of kills and of storage's turns")
    parser.add_argument("--keep", action="store_true", help="leave the folder where it was, whatever came of it")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="ckpt-soak-"))
    soak = Soak(folder, seed=arguments.seed, every_s=arguments.every_s, calm_s=arguments.calm_s)
    seconds, started = arguments.minutes * 60, time.monotonic()
    columns = (TextColumn("soak"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=seconds)
        soak.run_for(seconds, lambda text: bar.update(task, completed=time.monotonic() - started, description=text))
    table = Table(title=f"soak of {time.monotonic() - started:.0f} s, seed {arguments.seed}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for row in soak.table():
        table.add_row(*row)
    Console().print(table)
    for problem in soak.wrong:
        console.print(f"did not hold: {problem}", style="bold red", markup=False)
    if soak.wrong or arguments.keep:
        console.print(f"everything is in {folder}", markup=False)
    else:
        shutil.rmtree(folder)
        console.print("all of it held: nothing lost, nothing mixed, nothing left behind", style="green")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
