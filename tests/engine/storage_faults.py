"""Faults of storage by name: each sleeps in the stores of one keeper until a test wakes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.testing import store_env

KEEPER = "ckpt.keeper"  # in its command line, and in no test's
NBYTES = 20 << 20  # of the tensor: its file is written in three blocks
STEP = "step-*"  # any file of an attempt


class Fault:
    """One thing that goes wrong: a wrapper of stores, and what a save that meets it must say."""

    def __init__(self, name: str, says: str, *, debris: bool = False, **spec: Any) -> None:
        self.name = name
        self.says = says  # a regular expression, in the message
        self.debris = debris  # whether the storage does not even let what was written be removed
        self.spec = {"wrap": "faulty", "program": KEEPER, **spec}


def _full(code: str, says: str) -> Iterator[Fault]:
    writing = {"operation": ["write", "create", "close"], "match": f"{STEP}/*", "errno": code}
    for nbytes, moved in ((0, "0 bytes"), (1, "1 byte"), (10_000_000, r"[\d,]+ bytes \(\d\.\d MB\)")):
        yield Fault(f"{code} after {nbytes}", rf"{says} after {moved}.*", after_nbytes=nbytes, **writing)
    once = {"errno": code, "on_nth": 1, "after_nbytes": 0}
    for where, operation, match in (
        ("at the second write", "write", "*.safetensors"),
        ("in the part", "create", "part-*"),
        ("in the layout", "create", "layouts/*"),
        ("in COMMIT", "create", "COMMIT"),
        ("at open", "open_sink", "*.safetensors"),
        ("at close", "close", "*.safetensors"),
    ):
        nth = {"on_nth": 2} if operation == "write" else {}
        yield Fault(f"{code} {where}", says, **{**once, **nth}, operation=operation, match=match)


def faults() -> list[Fault]:
    """All that a save must end with an error for."""
    found = [*_full("ENOSPC", "no space left on the device"), *_full("EDQUOT", "the disk quota is used up")]
    for code, says in (
        ("EIO", "I/O error"),
        ("EACCES", "permission denied; check owner and mode"),
        ("EROFS", "the file system is read-only"),
        ("ESTALE", "the network mount went stale"),
        ("ETIMEDOUT", "ETIMEDOUT"),
    ):
        found += [
            Fault(f"{code} on {operation} of {match}", says, operation=operation, match=match, errno=code, on_nth=1)
            for operation, match in (
                ("open_sink", "*.safetensors"),
                ("write", "*.safetensors"),
                ("close", "*.safetensors"),
                ("create", "part-*"),
                ("create", "COMMIT"),
                ("list", "writers"),
            )
        ]
    found += [
        Fault("the answer of a close is lost", "I/O error", operation="close", match=STEP + "/*", on_nth=1, after=True),
        Fault("the answer of a part is lost", "I/O error", operation="create", match="part-*", on_nth=1, after=True),
        Fault("nothing but reading works", "read-only", operation="mutating", errno="EROFS"),
        Fault("nothing works at all", "I/O error", operation="*", errno="EIO"),
        Fault("what was written cannot be removed", "I/O error", debris=True, errno="EIO", match=STEP,
              operation=["create", "delete", "delete_folder"]),
    ]  # fmt: skip
    return found


class Sleeping:
    """Wrappers for ``CKPT_TEST_STORE``, each with a file of its own that keeps it asleep."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._names = {fault.name: folder / f"asleep-{number}" for number, fault in enumerate(faults)}
        for path in self._names.values():
            path.touch()
        sleeps = {"blocking": "release"}
        specs = [{**fault.spec, sleeps.get(fault.spec["wrap"], "unless"): self._names[fault.name]} for fault in faults]
        self.env: Mapping[str, str] = store_env(*specs)

    @contextmanager
    def awake(self, fault: Fault) -> Iterator[None]:
        """While the block runs, it goes wrong."""
        self._names[fault.name].unlink()
        try:
            yield
        finally:
            self._names[fault.name].touch()


def state_of(step: int, nbytes: int = NBYTES) -> dict[str, Any]:
    """Every element tells its step."""
    return {"w": torch.full((nbytes // 4,), float(step)), "step": step}


def is_of(run: str, step: int) -> bool:
    """Whether the step verifies, and is that step throughout."""
    found = ckpt.read(run, step=step)
    return ckpt.verify(run, step=step).ok and found["step"] == step and bool((found["w"] == step).all())


def seconds_of(act: Callable[..., object], *arguments: Any) -> tuple[BaseException | None, float]:
    """What it raised, and how long it took."""
    started = time.monotonic()
    try:
        act(*arguments)
    except ckpt.CkptError as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started
