"""Whether two runs are the same, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

__all__ = ["losses_table", "same_final_states"]


def same_final_states(run: Path, other: Path) -> tuple[bool, int]:
    """Whether the newest steps of two runs hold the same, bit for bit, and how many leaves were compared."""
    import ckpt  # with the import of torch, which the jobs above should not wait for

    leaves, others = dict(_leaves(ckpt.read(run))), dict(_leaves(ckpt.read(other)))
    return leaves == others, len(leaves)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested containers with its path; tensors as dtype, shape and bytes, floats as hex."""
    import torch

    match tree:
        case dict():
            for key, value in tree.items():
                yield from _leaves(value, f"{path}/{key!r}")
        case list() | tuple():
            for index, value in enumerate(tree):
                yield from _leaves(value, f"{path}/{index}")
        case torch.Tensor():
            yield path, (tree.dtype, tree.shape, tree.reshape(-1).view(torch.uint8).numpy().tobytes())
        case float():
            yield path, tree.hex()
        case _:
            yield path, tree


def losses_table(kept: dict[int, str], lost: dict[int, str], killed_at: int) -> Table:
    """The losses of both runs around the kill, as numbers and as the log has them."""
    table = Table("step", "in peace", "with the accident", "as written in the log", "", title="Some of the losses")
    steps = list(kept)
    for step in sorted({steps[0], *range(killed_at - 1, killed_at + 3), steps[-1]} & set(steps)):
        here, there = kept[step], lost.get(step, "nan")
        equal = "[green]the same" if here == there else f"[red]{there}"
        table.add_row(str(step), f"{float.fromhex(here):.6f}", f"{float.fromhex(there):.6f}", here, equal)
    return table
