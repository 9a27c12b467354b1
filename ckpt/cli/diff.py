"""``ckpt diff RUN STEP_A STEP_B [--json]``: compare two live steps.

JSON: ``{"equal", "run", "step_a", "attempt_a", "step_b", "attempt_b", "tensors": [{"name", "change":
"added" | "removed" | "reshaped" | "changed", "old", "new", "elements", "changed_elements",
"max_abs_difference", "old_nan", "old_inf", "new_nan", "new_inf"}], "values": [{"path", "old", "new"}],
"equal_tensors", "equal_values", "alarms": [{"change": "came" | "went", "kind", "tensor", "detail"}]}``.
``alarms`` are what looked wrong when one step was saved, and not with the other; equal states may differ in them.
An infinite difference is the text ``"inf"``. Exit code 1 when something differs.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import msgspec

from ckpt.cli.output import counted, emit_json, progress, say, step_number, table
from ckpt.engine.diff import DiffReport, TensorChange, diff

DIFFERENT_CODE = 1


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument("step_a", metavar="STEP_A", type=step_number, help="a live step")
    parser.add_argument("step_b", metavar="STEP_B", type=step_number, help="another one")


def run(arguments: argparse.Namespace) -> int:
    """Compare, and say what differs."""
    with progress("comparing") as advance:
        report = diff(arguments.run, arguments.step_a, arguments.step_b, advance)
    if arguments.json:
        emit_json(_document(report))
    else:
        _print(report)
    return 0 if report.equal else DIFFERENT_CODE


def _document(report: DiffReport) -> dict[str, Any]:
    document: dict[str, Any] = {"equal": report.equal, **msgspec.to_builtins(report)}
    for change, row in zip(report.tensors, document["tensors"], strict=True):
        if change.max_abs_difference is not None and math.isinf(change.max_abs_difference):
            row["max_abs_difference"] = "inf"
    return document


def _print(report: DiffReport) -> None:
    say(f"a: step {report.step_a} ({report.attempt_a})    b: step {report.step_b} ({report.attempt_b})")
    if report.tensors:
        rows = [[c.name, c.change, c.old or "", c.new or "", *_amount(c)] for c in report.tensors]
        columns = ["tensor", "change", "in a", "in b", "elements changed", "largest difference"]
        if any(c.old_nan or c.old_inf or c.new_nan or c.new_inf for c in report.tensors):
            columns += ["NaN in a", "NaN in b", "Inf in a", "Inf in b"]
            for row, c in zip(rows, report.tensors, strict=True):
                row += [str(count or "") for count in (c.old_nan, c.new_nan, c.old_inf, c.new_inf)]
        table(columns, rows, right=columns[4:])
    if report.values:
        table(["value", "in a", "in b"], [[v.path, v.old or "-", v.new or "-"] for v in report.values])
    if report.alarms:
        table(["alarm", "from a to b", "tensor", ""], [[c.kind, c.change, c.tensor, c.detail] for c in report.alarms])
    say(
        f"{counted(len(report.tensors), 'tensor')} and {counted(len(report.values), 'value')} differ; "
        f"{counted(report.equal_tensors, 'tensor')} and {counted(report.equal_values, 'value')} are equal"
    )


def _amount(change: TensorChange) -> tuple[str, str]:
    if change.changed_elements is None:
        return "", ""
    share = f"{change.changed_elements:,} of {change.elements:,}"
    return share, "" if change.max_abs_difference is None else f"{change.max_abs_difference:.3g}"
