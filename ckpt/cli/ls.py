"""``ckpt ls RUN [--all] [--json]``: the steps of a run, which are live, which are not, and why.

JSON: ``{"run", "latest": step or null, "steps": [{"step", "attempt", "state", "why", "latest": bool,
"world", "tensor_nbytes", "created_unix_s", "written_by", "writer", "job", "host"}], "not_live": count}``.
Without ``--all``, ``steps`` has the live ones only; what a torn or missing COMMIT leaves unknown is null.
``tensor_nbytes`` counts the tensors as they are in memory, by arithmetic on the layouts.
"""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

from ckpt.cli.output import counted, emit_json, nbytes_text, say, table, when_text
from ckpt.errors import CkptError
from ckpt.format.layout import Layout
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.live import LIVE
from ckpt.run import Run, StepState, Survey

_STYLES = {"live": None, "damaged": "red", "unsupported": "red"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument(
        "--all", action="store_true", help="show superseded, abandoned, damaged and unfinished ones too"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the steps."""
    opened = Run.open(arguments.run)
    opened.require()
    survey = opened.survey()
    live = survey.live
    latest = live[-1] if live else None
    shown = survey.steps if arguments.all else live
    rows = [_row(opened, survey, state, latest) for state in shown]
    if arguments.json:
        emit_json(
            {
                "run": opened.url,
                "latest": None if latest is None else latest.attempt.step,
                "steps": rows,
                "not_live": len(survey.steps) - len(live),
            }
        )
        return 0
    if rows:
        _print(rows)
    else:
        say(f"{opened.url}: no {'attempt' if arguments.all else 'live step'} yet")
    if not arguments.all:
        _print_others(survey)
    return 0


def _row(opened: Run, survey: Survey, state: StepState, latest: StepState | None) -> dict[str, Any]:
    commit = state.commit
    writer = next((w for w in survey.writers if w.number == state.attempt.writer), None)
    return {
        "step": state.attempt.step,
        "attempt": state.attempt.label,
        "state": state.state,
        "why": state.why or _why_live(survey, state),
        "latest": latest is not None and state.attempt == latest.attempt,
        "world": None if commit is None else commit.world,
        "tensor_nbytes": None if commit is None else _tensor_nbytes(opened, state),
        "created_unix_s": None if commit is None else commit.created_unix_s,
        "written_by": None if commit is None else commit.written_by,
        "writer": state.attempt.writer,
        "job": None if writer is None else writer.job,
        "host": None if writer is None else writer.host,
    }


def _why_live(survey: Survey, state: StepState) -> str:
    """A live step needs no reason but where other attempts have its number."""
    others = [s.attempt.label for s in survey.steps if s.attempt.step == state.attempt.step and s.state != LIVE]
    return f"instead of {', '.join(others)}" if others else ""


def _tensor_nbytes(opened: Run, state: StepState) -> int | None:
    """From layouts alone: parts would be read for every rank of every step."""
    if state.commit is None:
        return None
    try:
        return sum(_layout_nbytes(opened.layout(ref.digest)) for ref in state.commit.layouts)
    except CkptError:  # `ckpt verify` says what is wrong with it
        return None


def _layout_nbytes(layout: Layout) -> int:
    return sum(prod(tensor.shape) * DTYPE_NBYTES.get(tensor.dtype, 0) for tensor in layout.tensors if tensor.owners)


def _print(rows: list[dict[str, Any]]) -> None:
    with_why = any(row["why"] for row in rows)
    columns = ["step", "attempt", "state", "ranks", "tensors", "written", "host", *(["why"] if with_why else [])]
    cells = [
        [
            str(row["step"]),
            row["attempt"],
            f"{row['state']}, latest" if row["latest"] else row["state"],
            "?" if row["world"] is None else str(row["world"]),
            "?" if row["tensor_nbytes"] is None else nbytes_text(row["tensor_nbytes"]),
            "?" if row["created_unix_s"] is None else when_text(row["created_unix_s"]),
            row["host"] or "?",
            *([row["why"]] if with_why else []),
        ]
        for row in rows
    ]
    styles = [_STYLES.get(row["state"], "dim") if not row["latest"] else "bold" for row in rows]
    table(columns, cells, right=("step", "ranks", "tensors"), styles=styles)


def _print_others(survey: Survey) -> None:
    """One line for each attempt that someone may look for, one count for the rest."""
    numbers = {state.attempt.step for state in survey.live}
    others = [state for state in survey.steps if state.state != LIVE]
    newest = max(numbers, default=-1)
    named = [s for s in others if s.attempt.step in numbers or s.attempt.step > newest or s.state == "damaged"]
    for state in named[-5:]:
        say(f"not live: step {state.attempt.step} ({state.attempt.label}) is {state.state}: {state.why}", "dim")
    rest = len(others) - len(named[-5:])
    if rest:
        say(f"{counted(rest, 'more attempt')} not live: `ckpt ls --all` shows {'it' if rest == 1 else 'them'}", "dim")
