"""What verifying a step says: each problem with its place, and whether it can be repaired."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Progress = Callable[[int, int], None]  # bytes read, bytes in all


class Problem(msgspec.Struct, frozen=True):
    """One thing that is not as COMMIT pins it. ``file`` is a key in the run; ``chunk`` counts in its shard.

    ``repair`` is where `ckpt repair` can take the right bytes from (checked: they are there and right); None: nowhere.
    """

    file: str
    what: str
    tensor: str | None = None
    chunk: int | None = None
    repair: str | None = None

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f": {self.tensor}"
        chunk = "" if self.chunk is None else f": chunk {self.chunk}"
        repair = "" if self.repair is None else f"; can be repaired from {self.repair}"
        return f"{self.file}{tensor}{chunk}: {self.what}{repair}"


class VerifyReport(msgspec.Struct, frozen=True):
    """What verifying one step found."""

    run: str
    step: int
    attempt: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # worth knowing, no damage
    files: int
    tensors: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether every byte is the one that was saved."""
        return not self.problems
