"""``ckpt repair RUN [--step N | --all] [--from URL ...] [--dry-run] [--json]``: put damaged or missing files right.

The right bytes come from parity, from the roots given with ``--from`` (copies of the run's steps), or from what a file
is made of. Each is verified before anything is touched, and every step is read again afterwards. A copy of the rebuilt
file is durable before the damaged one is deleted, so it may be stopped at any point and started again.

JSON: ``{"run", "ok", "dry_run", "writers": [repaired], "steps": [{"ok", "step", "attempt", "repaired": [{"file",
"source", "tensor", "chunk"}], "left": [problem, as of verify]}]}``.
Exit code 4 when damage is left (with ``--dry-run``: would be left).
"""

from __future__ import annotations

import argparse

import msgspec

from ckpt.cli.output import counted, emit_json, one_of, progress, say, step_number
from ckpt.engine.repair import RepairReport, StepRepair, repair
from ckpt.errors import DamagedError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument("--step", type=step_number, metavar="N", help="the step to repair (default: the latest)")
    parser.add_argument("--all", action="store_true", help="repair every committed step, live or not")
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="URL",
        help="a root that holds copies of the run's steps; may be given several times",
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing, say what could be repaired from what")


def run(arguments: argparse.Namespace) -> int:
    """Repair, and say what was put right and what is left."""
    one_of(step=arguments.step is not None, all=arguments.all)
    with progress("repairing") as advance:
        report = repair(
            arguments.run,
            step=arguments.step,
            every_step=arguments.all,
            sources=arguments.sources,
            dry_run=arguments.dry_run,
            progress=advance,
        )
    if arguments.json:
        steps = [{"ok": step.ok, **msgspec.to_builtins(step)} for step in report.steps]
        emit_json({**msgspec.to_builtins(report), "ok": report.ok, "steps": steps})
    else:
        _print(report)
    return 0 if report.ok else DamagedError.exit_code


def _print(report: RepairReport) -> None:
    verb = "could be repaired" if report.dry_run else "repaired"
    for record in report.writers:
        say(f"{verb}: {record}", "green")
    if report.writers and report.dry_run:
        say("which steps there are can be said when the writers' records are right; repair without --dry-run")
    for step in report.steps:
        verdict = _verdict(step, verb, "would be" if report.dry_run else "is")
        say(f"step {step.step} ({step.attempt}): {verdict}", "green" if step.ok else "bold red")
        for repaired in step.repaired:
            say(f"  {verb}: {repaired}")
        for problem in step.left:
            say(f"  left: {problem}", "red")
    if not report.steps and not report.writers:
        say(f"{report.run}: no committed step yet")


def _verdict(step: StepRepair, verb: str, then: str) -> str:
    done = f"{counted(len(step.repaired), 'file')} {verb}"
    if step.left:
        left = counted(len(step.left), "problem")
        return f"{done}, {left} left" if step.repaired else f"{left}, and nothing to repair it from"
    return f"{done}, every byte {then} right" if step.repaired else "nothing to repair, every byte is right"
