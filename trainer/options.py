"""The command line of the trainer, read and checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.faults import Kill

__all__ = ["Options", "parse"]


@dataclass(frozen=True)
class Options:
    """The command line, checked. Batch sizes are of the whole job, whatever its number of ranks."""

    run: str
    steps: int
    every: int
    keep: int
    overlap: bool
    parallel: str
    device: str
    batch_size: int
    sequence_length: int
    accumulate: int
    layers: int
    width: int
    heads: int
    dropout: float
    lr: float
    warmup: int
    clip: float
    bf16: bool
    seed: int
    loss_log: Path | None
    events: Path | None
    kill: Kill | None

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.batch_size * self.sequence_length


def parse(argv: Sequence[str] | None = None, *, about: str | None = None) -> Options:
    """The options in ``argv``; ends the process with code 2 and one sentence when they do not fit together."""
    parser = argparse.ArgumentParser(
        prog="trainer", description=about, formatter_class=_HelpFormatter, allow_abbrev=False
    )
    where = parser.add_argument_group("the run")
    where.add_argument("--run", required=True, help="where its steps are kept: a path or URL; resumed when it has any")
    where.add_argument("--steps", type=_count, default=100, help="train until this many steps are done")
    where.add_argument("--every", type=_count, default=10, help="save each time this many steps are done")
    where.add_argument("--keep", type=_count, default=3, help="how many of the newest steps to keep")
    where.add_argument("--overlap", action="store_true", help="copy what a save takes while the next step computes")
    where.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data, the dropout")
    where.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="copy the model, or cut it up")
    where.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")

    what = parser.add_argument_group("the model")
    what.add_argument("--layers", type=_count, default=4)
    what.add_argument("--width", type=_count, default=192, help="of the residual stream")
    what.add_argument("--heads", type=_count, default=6)
    what.add_argument("--dropout", type=_fraction, default=0.0)

    how = parser.add_argument_group("the training")
    how.add_argument("--batch-size", type=_count, default=16, help="sequences per step, over all ranks")
    how.add_argument("--sequence-length", type=_count, default=128, help="tokens per sequence")
    how.add_argument("--accumulate", type=_count, default=1, help="pieces that each rank cuts its batch into")
    how.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    how.add_argument("--warmup", type=int, default=10, help="steps until it is reached")
    how.add_argument("--clip", type=float, default=1.0, help="highest norm of the gradient")
    how.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights and optimizer stay in float32")

    logs = parser.add_argument_group("logs")
    logs.add_argument("--loss-log", type=Path, help='append {"step", "loss"} here, the loss as float.hex()')
    logs.add_argument("--events", type=Path, help="append steps, saves and faults with their times here")

    fault = parser.add_argument_group("a fault, for demonstrations")
    fault.add_argument("--kill-rank", type=int, metavar="R", help="rank R dies by SIGKILL")
    fault.add_argument(
        "--at-step",
        type=_count,
        metavar="N",
        help="at the end of step N, before its save; only in a run that restored nothing",
    )

    given = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if (given.kill_rank is None) != (given.at_step is None):
        parser.error("--kill-rank and --at-step go together")
    if given.at_step is not None and given.at_step <= given.every:
        parser.error(
            f"--at-step {given.at_step} is not after the first save, --every {given.every}: it would die again"
        )
    if given.kill_rank is not None and not 0 <= given.kill_rank < world:
        parser.error(f"--kill-rank {given.kill_rank}: the ranks of this job are 0 to {world - 1}")
    if given.batch_size % (world * given.accumulate):
        parser.error(
            f"--batch-size {given.batch_size} cannot be divided evenly among {world} ranks"
            f" of {given.accumulate} pieces each: choose a multiple of {world * given.accumulate}"
        )
    if given.width % (2 * given.heads):
        parser.error(f"--width {given.width} is not a multiple of {2 * given.heads}, twice --heads")
    chosen = vars(given)
    kill_rank, at_step = chosen.pop("kill_rank"), chosen.pop("at_step")
    return Options(**chosen, kill=None if kill_rank is None else Kill(kill_rank, at_step))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and every option with its default."""


def _count(text: str) -> int:
    """A whole number of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _fraction(text: str) -> float:
    """At least 0 and less than 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value
