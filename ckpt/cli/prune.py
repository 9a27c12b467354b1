"""``ckpt prune RUN [--keep-last K] [--abandoned] [--dry-run] [--grace-s S] [--json]``: remove what no reader needs.

Attempts without COMMIT go once it is certain for ``S`` seconds that they cannot become steps;
live steps go only with ``--keep-last``, and never the only one that verifies.

JSON: ``{"run", "dry_run", "removed": [{"folder", "step", "attempt", "state", "why", "nbytes"}],
"removed_nbytes", "removed_layouts": [digest], "kept": [{"what", "why"}], "verified_step": step or null}``.
"""

from __future__ import annotations

import argparse

import msgspec

from ckpt.cli.output import counted, emit_json, nbytes_text, say, step_number, table
from ckpt.engine.retention import GRACE_S, prune


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument(
        "--keep-last",
        type=step_number,
        metavar="K",
        help="remove live steps but the newest K, and all that are not live; a step that stays is verified first",
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


def run(arguments: argparse.Namespace) -> int:
    """Prune, and say what went and what stayed."""
    report = prune(
        arguments.run,
        keep_last=arguments.keep_last,
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
    for kept in report.kept:
        say(f"kept {kept.what}: {kept.why}", "dim")
    if report.verified_step is not None:
        say(f"verified step {report.verified_step} before removing older ones")
    say(f"{verb} {counted(len(report.removed), 'attempt')}, {nbytes_text(report.removed_nbytes)}")
    return 0
