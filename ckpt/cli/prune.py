"""``ckpt prune RUN [--keep-last K …] [--abandoned] [--dry-run] [--grace-s S] [--json]``: remove what no reader needs.

Attempts without COMMIT go once it is certain for ``S`` seconds that they cannot become steps;
live steps go only with ``--keep-last``, and never the only one that verifies, nor one that a reader holds.
``--keep-best val_loss``, ``val_loss:3`` or ``accuracy:3:max`` also keeps the step(s) with the least (greatest) metric.

JSON: ``{"run", "dry_run", "removed": [{"folder", "step", "attempt", "state", "why", "nbytes"}],
"removed_nbytes", "removed_layouts": [digest], "removed_holds": [key], "kept": [{"what", "why"}],
"verified_step": step or null}``.
"""

from __future__ import annotations

import argparse

import msgspec

from ckpt.cli.output import counted, emit_json, nbytes_text, say, step_number, table
from ckpt.engine.retention import GRACE_S, prune
from ckpt.format.metrics import is_metric_name
from ckpt.plan.retention import MAX, MIN, Best


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument(
        "--keep-last",
        type=step_number,
        metavar="K",
        help="remove live steps but the newest K, and all that are not live; a step that stays is verified first",
    )
    parser.add_argument(
        "--keep-every", type=step_number, metavar="N", help="with --keep-last: keep the multiples of N too"
    )
    parser.add_argument(
        "--keep-best",
        type=_best,
        metavar="METRIC[:COUNT[:min|max]]",
        help="with --keep-last: keep the steps with the least (or greatest) metric too; COUNT is 1",
    )
    parser.add_argument("--abandoned", action="store_true", help="remove superseded, abandoned and damaged steps")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=GRACE_S,
        metavar="S",
        help="how long an attempt without COMMIT must have been over (default: %(default)g seconds)",
    )


def _best(text: str) -> Best:
    """Argparse type of METRIC[:COUNT[:min|max]]; a metric's name may have colons itself."""
    words = text.split(":")
    mode = words.pop() if len(words) > 2 and words[-1] in {MIN, MAX} else MIN
    count = int(words.pop()) if len(words) > 1 and words[-1].isdecimal() and words[-1].isascii() else 1
    metric = ":".join(words)
    if not is_metric_name(metric) or not 1 <= count < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r}: expected METRIC, METRIC:COUNT or METRIC:COUNT:min (or max)")
    return Best(metric, count, mode)


def run(arguments: argparse.Namespace) -> int:
    """Prune, and say what went and what stayed."""
    report = prune(
        arguments.run,
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        keep_best=arguments.keep_best,
        not_live=arguments.abandoned,
        grace_s=arguments.grace_s,
        dry_run=arguments.dry_run,
    )
    if arguments.json:
        emit_json({**msgspec.to_builtins(report), "removed_nbytes": report.removed_nbytes})
        return 0
    verb = "would remove" if report.dry_run else "removed"
    if report.removed:
        rows = [[r.folder, r.state, nbytes_text(r.nbytes), r.why] for r in report.removed]
        table(["folder", "state", "size", "why"], rows, right=("size",))
    for digest in report.removed_layouts:
        say(f"{verb} layouts/{digest}.json: no step needs it")
    for key in report.removed_holds:
        say(f"{verb} {key}: the hold of a reader that is gone")
    for kept in report.kept:
        say(f"kept {kept.what}: {kept.why}", "dim")
    if report.verified_step is not None:
        say(f"verified step {report.verified_step} before removing older ones")
    say(f"{verb} {counted(len(report.removed), 'attempt')}, {nbytes_text(report.removed_nbytes)}")
    return 0
