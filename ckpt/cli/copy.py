"""``ckpt copy SRC DST [--step N | --all] [--json]``: copy committed steps to another place.

The copy has the same attempts with the same bytes, so `ckpt load` and `ckpt repair` take it as a tier. Every byte is
compared with what was saved on the way; a step with damage is not made at DST, and the exit code is 4. What is whole at
DST already is not copied again, so a copy that was stopped is gone on with by the same command.

JSON: ``{"run", "target", "steps": [{"step", "attempt", "outcome": copied, already there or damaged, "files",
"nbytes", "skipped_files", "skipped_nbytes"}], "writers": records created, "problems": [{"file", "what", "tensor",
"chunk", "repair"}], "skipped": [text], "ok"}``.
"""

from __future__ import annotations

import argparse
import time

import msgspec

from ckpt.cli.output import counted, emit_json, nbytes_text, progress, say, step_number
from ckpt.engine.copy import COPIED, DAMAGED, THERE, CopiedStep, copy_steps
from ckpt.errors import DamagedError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help="a RUN's root: a path or a URL")
    parser.add_argument("target", metavar="DST", help="where to: a new place, or an older copy of the same run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=step_number, metavar="N", help="the live step to copy (default: the latest)")
    which.add_argument("--all", action="store_true", help="copy all live steps")


def run(arguments: argparse.Namespace) -> int:
    """Copy, and say what went over."""
    started = time.perf_counter()
    with progress("copying") as advance:
        report = copy_steps(
            arguments.source, arguments.target, step=arguments.step, every_step=arguments.all, progress=advance
        )
    seconds = time.perf_counter() - started
    code = 0 if report.ok else DamagedError.exit_code
    if arguments.json:
        emit_json({**msgspec.to_builtins(report), "ok": report.ok})
        return code
    for step in report.steps:
        say(_line(step, seconds if len(report.steps) == 1 else None))
    for problem in report.problems:
        say(f"  {problem}")
    for skipped in report.skipped:
        say(f"passed over: {skipped}")
    if len(report.steps) > 1:
        copied = [step for step in report.steps if step.outcome == COPIED]
        nbytes = nbytes_text(sum(step.nbytes for step in copied))
        say(f"{len(copied)} of {counted(len(report.steps), 'step')} copied, {nbytes} in {seconds:.1f} s")
    return code


def _line(step: CopiedStep, seconds: float | None) -> str:
    name = f"step {step.step} ({step.attempt})"
    if step.outcome == THERE:
        return f"{name}: already there"
    if step.outcome == DAMAGED:
        return f"{name}: damaged, so it was not made there; `ckpt repair` may help"
    text = f"{name}: {counted(step.files, 'file')}, {nbytes_text(step.nbytes)} copied"
    if seconds is not None:
        text += f" in {seconds:.1f} s"
    if step.skipped_files:
        there = counted(step.skipped_files, "file")
        text += f"; {there}, {nbytes_text(step.skipped_nbytes)} {'was' if step.skipped_files == 1 else 'were'} there"
    return text
