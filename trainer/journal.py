"""What a training job tells: lines for people, a log of losses, and a log of events with their times.

The loss log has one line per step, ``{"step": 7, "loss": "0x1.5fa2c00000000p+2"}``: the loss is written as
``float.hex()`` writes it, so two logs agree exactly when the numbers agree bit for bit. The file is appended to. A
job that died after step 17 and went on from step 10 has logged 11 to 17 twice; ``read_losses`` takes the last line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import ckpt
from trainer.parallel import Place

__all__ = ["Journal", "read_events", "read_losses"]


class Journal:
    """The voice of rank 0; on the other ranks every method but ``event(..., any_rank=True)`` does nothing.

    ``loss_log`` and ``events`` are files to append to, or None. Every line reaches the operating
    system when it is written, so it outlives the process.
    """

    def __init__(self, place: Place, *, loss_log: Path | None, events: Path | None) -> None:
        self._speaks = place.rank == 0
        self._rank = place.rank
        self._paths = (loss_log if self._speaks else None, events)
        self._open = ExitStack()
        self._losses: TextIO | None = None
        self._events: TextIO | None = None
        self._last_step_at = time.monotonic()
        self._saved: int | None = None  # the newest save, and the newest commit, that were told of
        self._committed: int | None = None

    def __enter__(self) -> Self:
        self._losses, self._events = (self._append_to(path) for path in self._paths)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _append_to(self, path: Path | None) -> TextIO | None:
        if path is None:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a", buffering=1, encoding="utf-8")  # 1: flushed at every line
        except OSError as error:
            raise ckpt.BadInputError(
                f"{path}: no log can be appended to here ({error.strerror}); name another file"
            ) from None
        return self._open.enter_context(file)

    def say(self, line: str) -> None:
        """Print one line, on rank 0."""
        if self._speaks:
            print(line, flush=True)

    def event(self, name: str, *, any_rank: bool = False, **facts: object) -> None:
        """Append one line to the log of events; ``time_s`` is the wall clock, in seconds since 1970."""
        if self._events is not None and (self._speaks or any_rank):
            line = json.dumps({"event": name, "time_s": time.time(), "rank": self._rank, **facts})
            self._events.write(line + "\n")

    def begin(self, restored_step: int | None) -> None:
        """Tell where training starts; the first step's throughput is measured from here."""
        self.event("begin", restored_step=restored_step)
        self._last_step_at = time.monotonic()

    def step(self, step: int, total: int, *, loss: float, norm: float, rate: float, tokens: int) -> None:
        """Tell of one step: its number of ``total``, the loss, the gradient's norm, the learning rate used."""
        now = time.monotonic()
        elapsed_s, self._last_step_at = now - self._last_step_at, now
        if self._losses is not None:
            self._losses.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")
        self.event("step", step=step, loss=loss)
        self.say(
            f"step {step:>6}/{total}   loss {loss:7.4f}   gradient norm {norm:6.3f}"
            f"   learning rate {rate:.2e}   {tokens / elapsed_s:>9,.0f} tokens/s"
        )

    def saves(self, checkpointer: ckpt.Checkpointer) -> None:
        """Tell of the newest save and the newest commit, each once, as events of every rank."""
        pending, report = checkpointer.pending, checkpointer.last_save
        if pending is not None and pending.step != self._saved:
            self._saved = pending.step
            self.event("save", any_rank=True, step=pending.step, stall_s=pending.stall_s)
            self.say(f"saved step {pending.step}: training waited {pending.stall_s * 1000:.0f} ms")
        if report is not None and report.step != self._committed:
            self._committed = report.step
            facts = {"stall_s": report.stall_s, "commit_s": report.commit_s, "nbytes": report.nbytes}
            self.event("commit", any_rank=True, step=report.step, **facts)


def complain(sentence: str) -> None:
    """Say on stderr, in one line, why the job ends."""
    print(f"trainer: {sentence}", file=sys.stderr, flush=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # else somebody is writing it right now
            yield json.loads(line)


def read_losses(path: Path) -> dict[int, str]:
    """Step to loss (as ``float.hex()`` wrote it), in the order of the steps; a step done twice counts as done last."""
    losses = {line["step"]: line["loss"] for line in _lines(path)}
    return dict(sorted(losses.items()))


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of all ranks, in the order in which they were written; none when there is no such file yet."""
    return list(_lines(path)) if path.exists() else []
