"""A training run loses a worker and nothing else: ``make demo``, or ``python -m trainer.demo``.

Two ranks train a small GPT with FSDP2, twice from the same seed: once in peace, and once with one rank killed
by SIGKILL between two saves and the job started again. Then the two loss logs and the two final states are compared
bit for bit, and what the accident cost is told in a table and a picture. Everything lands in ``demo-out/``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from trainer.demo.compare import losses_table, same_final_states
from trainer.demo.cost import cost_table, reckon
from trainer.demo.course import RANKS, Course, start
from trainer.demo.picture import draw
from trainer.journal import read_events, read_losses

KILLED_RANK = 1

console = Console()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 when everything that it claims held."""
    parser = argparse.ArgumentParser(prog="trainer.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="this folder is removed and made again")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="save each time this many steps are done")
    parser.add_argument("--kill-at", type=int, default=27, help="the step at whose end the rank is killed")
    options = parser.parse_args(argv)
    if not options.every < options.kill_at < options.steps:
        parser.error("--kill-at must lie after the first save and before the last step")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the same door as Ctrl-C: end the jobs first
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    fault = ("--kill-rank", str(KILLED_RANK), "--at-step", str(options.kill_at))
    peace = Course("peace", out / "peace", options.steps, options.every)
    accident = Course("accident", out / "accident", options.steps, options.every, fault)

    console.rule(f"[bold]1. {options.steps} steps on {RANKS} ranks, in peace")
    require(start(peace, console) == 0, f"the run in peace failed; see {peace.printed}")

    console.rule(f"[bold]2. The same, but rank {KILLED_RANK} gets SIGKILL at the end of step {options.kill_at}")
    code = start(accident, console)
    killed = any(event["event"] == "killed" for event in read_events(accident.events))
    require(killed and code != 0, f"the job was to die of the kill, and did not; see {accident.printed}")
    console.print("The job is down. The very same command again:")
    require(start(accident, console) == 0, f"the restarted job failed; see {accident.printed}")

    console.rule("[bold]3. Both runs, number by number")
    lost, kept = read_losses(accident.losses), read_losses(peace.losses)
    differing = [step for step in kept if kept[step] != lost.get(step)]
    same_losses = not differing and len(kept) == len(lost) == options.steps
    console.print(losses_table(kept, lost, options.kill_at))
    same_state, compared = same_final_states(peace.run, accident.run)

    console.rule("[bold]4. What is on disk")
    cli("ls", os.path.relpath(accident.run))
    verified = cli("verify", os.path.relpath(accident.run), "--all") == 0

    console.rule("[bold]5. What the accident cost")
    cost = reckon(accident)
    console.print(cost_table(cost))
    picture = out / "demo.png"
    draw(picture, peace, accident, cost, same=same_losses)

    console.rule("[bold]What this showed")
    console.print(
        f"Rank {KILLED_RANK} of {RANKS} was killed without warning at the end of step {cost.killed_at}."
        f" Started again, the job went on from step {cost.restored}, did {cost.steps_lost} steps again,"
        f" and had done the first of them {cost.restart_s:.1f} s after the kill."
    )
    console.print(
        f"All {options.steps} losses are the same, bit for bit, as those of the run that was never disturbed."
        if same_losses
        else f"[red]The losses differ at steps {differing or 'that one log lacks'}.[/red]"
    )
    console.print(
        f"All {compared} tensors and values of the final state are the same too: weights, optimizer, schedule,"
        " position in the data, random generators."
        if same_state
        else "[red]The final states differ.[/red]"
    )
    console.print(
        "Every byte of every step on disk has the digest that its COMMIT pinned."
        if verified
        else "[red]ckpt verify found damage.[/red]"
    )
    console.print(f"The picture: {picture}")
    return 0 if same_losses and same_state and verified else 1


def require(held: bool, otherwise: str) -> None:
    """End the demonstration with one sentence when what it stands on does not hold."""
    if not held:
        console.print(f"[red]{otherwise}[/red]")
        sys.exit(1)


def cli(*arguments: str) -> int:
    """Run the ``ckpt`` command as a person would, and return its exit code."""
    console.print(f"[bold]$ ckpt {' '.join(arguments)}")
    return subprocess.run([sys.executable, "-m", "ckpt.cli", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
