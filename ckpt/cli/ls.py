"""``ckpt ls RUN [--all] [--json]``: the steps of a run, which are live, which are not, and why.

JSON: ``{"run", "latest": step or null, "steps": [{"step", "attempt", "state", "why", "latest": bool,
"world", "tensor_nbytes", "metrics", "alarms": [kind], "created_unix_s", "written_by", "writer", "job", "host"}],
"not_live": count}``.
Without ``--all``, ``steps`` has the live ones only; what a torn or missing COMMIT leaves unknown is null.
``metrics`` are those that were saved with the step: name to a number, or to the text "nan", "inf" or "-inf".
``alarms`` are the kinds of what looked wrong when the step was saved; ``ckpt show`` says of which tensors.
``tensor_nbytes`` counts the tensors as they are in memory, by arithmetic on the layouts.
"""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

from ckpt.cli.output import counted, emit_json, nbytes_text, say, table, when_text
from ckpt.errors import CkptError
from ckpt.format.alarms import KINDS
from ckpt.format.layout import Layout
from ckpt.format.metrics import json_number
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.live import LIVE
from ckpt.reading.alarms import step_alarms
from ckpt.run import Run, StepState, Survey

_METRICS_SHOWN = 4
_METRIC_NAME_CHARS = 16  # of a column's head

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
        "metrics": None if commit is None else _metrics(opened, state),
        "alarms": None if commit is None else _alarms(opened, state),
        "created_unix_s": None if commit is None else commit.created_unix_s,
        "written_by": None if commit is None else commit.written_by,
        "writer": state.attempt.writer,
        "job": None if writer is None else writer.job,
        "host": None if writer is None else writer.host,
    }


def _metrics(opened: Run, state: StepState) -> dict[str, float | str] | None:
    assert state.commit is not None
    try:
        return {name: json_number(value) for name, value in opened.metrics(state.attempt, state.commit).items()}
    except CkptError:  # `ckpt verify` says what is wrong with them
        return None


def _alarms(opened: Run, state: StepState) -> list[str] | None:
    assert state.commit is not None
    try:
        found = {alarm.kind for alarm in step_alarms(opened, state.attempt, state.commit)}
    except CkptError:
        return None
    return [kind for kind in KINDS if kind in found]


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
    with_alarms = any(row["alarms"] for row in rows)
    names = sorted({name for row in rows for name in row["metrics"] or ()})
    shown = names[:_METRICS_SHOWN]
    heads = [name if len(name) <= _METRIC_NAME_CHARS else f"{name[: _METRIC_NAME_CHARS - 1]}…" for name in shown]
    columns = ["step", "attempt", "state", "ranks", "tensors", *heads, "written", "host"]
    columns += [name for name, shows in (("alarms", with_alarms), ("why", with_why)) if shows]
    cells = [
        [
            str(row["step"]),
            row["attempt"],
            f"{row['state']}, latest" if row["latest"] else row["state"],
            "?" if row["world"] is None else str(row["world"]),
            "?" if row["tensor_nbytes"] is None else nbytes_text(row["tensor_nbytes"]),
            *(_metric_text(row["metrics"], name) for name in shown),
            "?" if row["created_unix_s"] is None else when_text(row["created_unix_s"]),
            row["host"] or "?",
            *(["?" if row["alarms"] is None else ", ".join(row["alarms"])] if with_alarms else []),
            *([row["why"]] if with_why else []),
        ]
        for row in rows
    ]
    styles = [_STYLES.get(row["state"], "dim") if not row["latest"] else "bold" for row in rows]
    table(columns, cells, right=("step", "ranks", "tensors", *heads), styles=styles)
    if len(names) > len(shown):
        say(f"{counted(len(names) - len(shown), 'more metric')}: `ckpt ls --json` has all", "dim")


def _metric_text(metrics: dict[str, float | str] | None, name: str) -> str:
    if metrics is None:
        return "?"
    value = metrics.get(name, "")
    return value if isinstance(value, str) else f"{value:.4g}"


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
