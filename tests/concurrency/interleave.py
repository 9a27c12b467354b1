"""Two parties in one process, one of which comes in at a given operation of the other's store: every order, no luck."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ckpt.format import records
from ckpt.format.commit import COMMIT, FileRef, decode_commit, encode_commit
from ckpt.format.metrics import METRICS, encode_metrics
from ckpt.format.values import TensorRef
from ckpt.keeper.retention import Known
from ckpt.plan.retention import KeepPolicy
from ckpt.run import Run
from ckpt.store import LocalStore
from ckpt.store.base import Store
from ckpt.testing.handmade import HandTensor, write_step
from ckpt.testing.wrapped import WrappedStore

T = TypeVar("T")

NBYTES = 100_000


class MeetingStore(WrappedStore):
    """Before operation number ``at``, counted from 0, someone else does something; ``seen`` are all operations."""

    def __init__(self, inner: Store, at: int | None = None, act: Callable[[], object] = lambda: None) -> None:
        super().__init__(inner)
        self.seen: list[str] = []
        self._at, self._act = at, act

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:
        self.seen.append(f"{operation} {key}")
        if len(self.seen) - 1 == self._at:
            self._act()
        return call()


def content(step: int, attempt: int) -> bytes:
    """What the only tensor of an attempt is full of: no two attempts have it in common."""
    return bytes([1 + step * 16 + attempt]) * NBYTES


def save(url: str | Path, *steps: int) -> None:
    """Steps by hand; each attempt's tensor is full of its own number."""
    run = Run.open(url)
    for step in steps:
        save = 1 + sum(attempt.step == step for attempt in run.attempts())
        tensor = HandTensor("w", "uint8", (NBYTES,), content(step, save), mesh=(2,), placements=("S0",))
        write_step(run, step, [tensor], world=2, values={"step": step, "w": TensorRef("w")})


def retain(run: Run, last: int = 1, known: Known | None = None) -> list[str]:
    """What a keeper does after the newest step's COMMIT; its warnings."""
    warnings: list[str] = []
    (known or Known()).retain(run, run.find().attempt, KeepPolicy(last=last), warnings)
    return warnings


def meeting(url: str | Path, at: int | None = None, act: Callable[[], object] = lambda: None) -> tuple[Run, list[str]]:
    """A run whose store somebody else comes into, and its operations."""
    store = MeetingStore(LocalStore(url), at, act)
    return Run(store), store.seen


def damage(url: str | Path, step: int) -> None:
    """Flip one byte of a step's tensor."""
    path = next(Path(url).glob(f"step-{step:08d}-*/state-00001-*"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def folders(url: str | Path) -> list[str]:
    """Attempts of which anything is left."""
    return sorted(path.name for path in Path(url).glob("step-*"))


def give_metrics(run: Run, step: int, **metrics: float) -> None:
    """As if the step had been saved with them."""
    attempt = run.find(step).attempt
    raw = encode_metrics(attempt, metrics)
    path = Path(run.url, attempt.folder)
    commit = decode_commit((path / COMMIT).read_bytes(), "here")
    ref = FileRef(METRICS, len(raw), records.digest(raw))
    (path / METRICS).write_bytes(raw)
    (path / COMMIT).write_bytes(encode_commit(msgspec.structs.replace(commit, files=(*commit.files, ref))))
