"""Saves whose copy goes wrong half-way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import ckpt
from ckpt.engine import filling
from ckpt.snapshot.copy import copy_into
from tests.ranks import run_ranks

NUMEL = 12 << 20


def copy_that_fails(rank: int, world: int, run: str) -> list[str]:
    """Save twice; on rank 1 the first copy fails half-way. What each rank was told."""

    def fails(arena: memoryview, copies: list[tuple[torch.Tensor, int]], _: Callable[[int], None] | None) -> None:
        copy_into(arena, copies, lambda _: 1 / 0)

    told = []
    state = {"w": ckpt.per_rank(torch.full((NUMEL,), 1.0 + rank))}
    if rank == 1:
        filling.copy_into = fails  # type: ignore[assignment]
    try:
        ckpt.save(run, 1, state).result(60)
    except (ZeroDivisionError, ckpt.CkptError) as error:
        told.append(f"{type(error).__name__}: {error}")
    filling.copy_into = copy_into
    told.append(ckpt.save(run, 1, state).result(60).attempt)
    target = {"w": ckpt.per_rank(torch.zeros(NUMEL))}
    ckpt.load(run, target)
    assert torch.equal(target["w"].value, state["w"].value)
    return told


def test_a_copy_that_fails_half_way(tmp_path: Path) -> None:
    """The rank raises its own error, the other one hears of it, nothing is left, and the next save works."""
    first, second = run_ranks(2, copy_that_fails, str(tmp_path / "run"))
    assert first[0] == "RankError: save of step 1 (w1.1) failed: rank 1: ZeroDivisionError: division by zero"
    assert second[0] == "ZeroDivisionError: division by zero"
    assert first[1] == second[1] == "w1.2"
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001-w1.2"]
