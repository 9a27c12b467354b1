"""``ckpt restore RUN DEST [--step N] [--format safetensors|torch] [--json]``: merge shards into whole tensors.

DEST is a new or empty local folder. ``safetensors`` gives ``model.safetensors``,
``optimizer.safetensors``, ``state.safetensors`` (those that have tensors) and ``values.json``;
``torch`` gives one ``step-N.pt`` for ``torch.load(..., weights_only=True)`` and is the only case
that imports torch.

JSON: ``{"run", "step", "attempt", "dest", "format", "files": {name: bytes}, "tensors", "tensor_nbytes"}``.
"""

from __future__ import annotations

import argparse
import time

import msgspec

from ckpt.cli.output import counted, emit_json, nbytes_text, progress, say, step_number
from ckpt.engine.export import FORMATS, restore


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument("dest", metavar="DEST", help="a new or empty local folder")
    parser.add_argument("--step", type=step_number, metavar="N", help="the step to restore (default: the latest)")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Restore, and say what was written."""
    started = time.perf_counter()
    with progress("restoring") as advance:
        report = restore(arguments.run, arguments.dest, arguments.step, arguments.format, advance)
    seconds = time.perf_counter() - started
    if arguments.json:
        emit_json(msgspec.to_builtins(report))
        return 0
    say(
        f"step {report.step} ({report.attempt}): {counted(report.tensors, 'tensor')}, "
        f"{nbytes_text(report.tensor_nbytes)}, restored in {seconds:.1f} s"
    )
    for name, nbytes in report.files.items():
        say(f"  {report.dest}/{name}  {nbytes_text(nbytes)}")
    return 0
