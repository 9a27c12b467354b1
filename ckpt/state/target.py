"""What a load found, what it reads, and what it does at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckpt.errors import MismatchError
from ckpt.state.kinds import Order
from ckpt.state.records import Mismatch, Read


class LoadTarget:
    """What a load found on this rank, what it reads, and what it does at the end.

    ``reads`` are to be carried out in any order; then ``apply`` is called. Tensors that are filled in
    place are filled by the reads themselves: before the first of them nothing in the target has changed.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.missing: list[str] = []  # the state has it, the step does not
        self.unexpected: list[str] = []  # the step has it, the state does not
        self.mismatched: list[Mismatch] = []  # both have it, of other shape, dtype or kind
        self.ignored: list[str] = []  # top-level keys of the step that the state does not ask for
        self._acts: list[list[Callable[[], None]]] = [[] for _ in Order]

    def later(self, order: Order, act: Callable[[], None]) -> None:
        """Have ``act`` called by ``apply``: lower ``order`` first, else as they were added."""
        self._acts[order].append(act)

    def refuse_misfits(self) -> None:
        """Raise one MismatchError that lists all that is missing, unexpected or mismatched, if anything is."""
        if not (self.missing or self.unexpected or self.mismatched):
            return
        lines = ["the step does not fit the state (nothing was changed):"]
        for title, found in (
            ("missing, in the state but not in the step", self.missing),
            ("unexpected, in the step but not in the state", self.unexpected),
            ("mismatched", self.mismatched),
            ("ignored, since the state has no such top-level key", self.ignored),
        ):
            if found:
                lines.append(f"  {title}:")
                lines += [f"    {item}" for item in found]
        advice = "  pass strict=False to load the rest"
        if any(m.stored.split(" ", 1)[1:] == m.wanted.split(" ", 1)[1:] for m in self.mismatched):
            advice += ", cast=True to convert dtypes"
        raise MismatchError("\n".join([*lines, advice]))

    def apply(self) -> None:
        """Set all that is not filled in place: values, optimizers' settings, objects' states, generators.

        Called once, when every read has been carried out. Raises BadInputError when an object refuses
        what it once gave; part of the target is changed then.
        """
        with torch.no_grad():
            for acts in self._acts:
                for act in acts:
                    act()
