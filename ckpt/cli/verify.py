"""``ckpt verify RUN [--step N | --all] [--json]``: read every byte and list every problem.

JSON: ``{"run", "ok", "reports": [{"ok", "run", "step", "attempt", "problems": [{"file", "what",
"tensor": name or null, "chunk": index or null, "repair": where the right bytes are, or null}], "notes": [text],
"files", "tensors", "bytes_read"}]}``.
Exit code 4 when there is a problem.
"""

from __future__ import annotations

import argparse
import time

import msgspec

from ckpt.cli.output import counted, emit_json, nbytes_text, one_of, progress, say, step_number
from ckpt.errors import DamagedError
from ckpt.reading.verify import VerifyReport, verify, verify_all
from ckpt.run import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument("--step", type=step_number, metavar="N", help="the step to verify (default: the latest)")
    parser.add_argument("--all", action="store_true", help="verify every committed step, live or not")


def run(arguments: argparse.Namespace) -> int:
    """Verify, and say what was found."""
    one_of(step=arguments.step is not None, all=arguments.all)
    opened = Run.open(arguments.run)
    reports: list[VerifyReport] = []
    with progress("verifying") as advance:
        started = time.perf_counter()
        if arguments.all:
            for report in verify_all(opened, advance):
                reports.append(report)
                if not arguments.json:
                    _print(report, time.perf_counter() - started)
                started = time.perf_counter()
        else:
            reports.append(verify(opened, "latest" if arguments.step is None else arguments.step, progress=advance))
    ok = all(report.ok for report in reports)
    if arguments.json:
        documents = [{"ok": report.ok, **msgspec.to_builtins(report)} for report in reports]
        emit_json({"run": opened.url, "ok": ok, "reports": documents})
    elif not arguments.all:
        _print(reports[0], time.perf_counter() - started)
    elif not reports:
        say(f"{opened.url}: no committed step yet")
    return 0 if ok else DamagedError.exit_code


def _verdict(report: VerifyReport) -> str:
    """How many problems there are, and how many of them can be repaired from what the step itself has."""
    found, fixed = len(report.problems), sum(problem.repair is not None for problem in report.problems)
    if fixed == found:
        return f"{counted(found, 'problem')}, `ckpt repair` can put {'it' if found == 1 else 'all'} right"
    which = f"{fixed} of which can" if fixed else "which cannot" if found == 1 else "none of which can"
    return f"{counted(found, 'problem')}, {which} be repaired from here"


def _print(report: VerifyReport, seconds: float) -> None:
    read = f"{counted(report.tensors, 'tensor')} in {counted(report.files, 'file')}, {nbytes_text(report.bytes_read)}"
    verdict = "every byte is right" if report.ok else _verdict(report)
    say(
        f"step {report.step} ({report.attempt}): {verdict} ({read} read in {seconds:.1f} s)",
        "green" if report.ok else "bold red",
    )
    for problem in report.problems:
        say(f"  {problem}", "red")
    for note in report.notes:
        say(f"  note: {note}", "dim")
