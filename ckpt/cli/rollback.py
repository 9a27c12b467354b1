"""``ckpt rollback RUN --to N [--json]``: make step N the latest; nothing is deleted.

It is one more writer record that goes on from N. A job that still writes to the run is fenced by
it: its next save fails and says so.

JSON: ``{"run", "to", "writer": number of the new record, "no_longer_live": [{"step", "attempt"}]}``.
"""

from __future__ import annotations

import argparse

from ckpt.cli.output import emit_json, say, step_number
from ckpt.run import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument("--to", type=step_number, metavar="N", required=True, help="the live step to go back to")


def run(arguments: argparse.Namespace) -> int:
    """Roll back, and say which steps are no longer live."""
    opened = Run.open(arguments.run)
    opened.find(arguments.to)
    before = opened.survey().live
    writer = opened.rollback(arguments.to)
    live = {state.attempt for state in opened.survey().live}
    gone = [state.attempt for state in before if state.attempt not in live]
    if arguments.json:
        emit_json(
            {
                "run": opened.url,
                "to": arguments.to,
                "writer": writer.number,
                "no_longer_live": [{"step": attempt.step, "attempt": attempt.label} for attempt in gone],
            }
        )
        return 0
    steps = ", ".join(f"{attempt.step} ({attempt.label})" for attempt in gone)
    say(f"step {arguments.to} is the latest now (writer {writer.number}); a job that still writes here will be stopped")
    say(f"no longer live: {steps or 'none, it was the latest already'}")
    if gone:
        say(f"nothing was deleted; `ckpt prune {arguments.run} --abandoned` removes what is no longer live", "dim")
    return 0
