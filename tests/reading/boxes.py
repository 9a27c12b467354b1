"""Boxes of a tensor, for tests that read them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ckpt.plan.boxes import Box, whole_box


def some_boxes(shape: Sequence[int], choose: random.Random, count: int) -> Iterator[Box]:
    """The whole tensor, then so many random boxes of it, empty ones among them."""
    yield whole_box(tuple(shape))
    for _ in range(count):
        bounds = [sorted(choose.choices(range(n + 1), k=2)) for n in shape]
        yield Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
