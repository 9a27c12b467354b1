"""Small training jobs for tests: the trainer's own ``main`` on real ranks, on a text of a hundred samples."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

MODEL = ["--layers=2", "--width=32", "--heads=2", "--dropout=0.1", "--sequence-length=16"]
TINY = [*MODEL, "--batch-size=12", "--warmup=3", "--device=cpu", "--steps=12", "--every=1", "--keep=12"]
SAMPLES = 100  # windows in the text: 12 steps of 12 sequences pass the end of the first epoch in step 9


def train(world: int, run: Path, *extra: str, losses: Path | None = None, samples: Path | None = None) -> None:
    """Train TINY (argparse lets later options win) until it ends well; ``samples`` notes what each rank read."""
    argv = [*TINY, "--run", str(run), *extra]
    if losses is not None:
        argv += ["--loss-log", str(losses)]
    codes = run_ranks(world, _train, argv, None if samples is None else str(samples))
    assert codes == [0] * world


def _train(rank: int, _world: int, argv: list[str], samples: str | None) -> int:
    _hush()
    module = shortened(samples and f"{samples}-{os.getpid()}")
    code: int = module.main(argv)
    return code


def shortened(samples: str | None = None) -> Any:
    """The trainer's module with a short text, noting the number of every sample that is read in a file."""
    import trainer.data
    from trainer import train

    text = trainer.data.library_text()[: SAMPLES * 16 + 1]
    train.library_text = lambda: text

    class Noting(trainer.data.Windows):
        def __getitem__(self, index: int) -> Any:
            with Path(samples).open("a") as file:
                file.write(f"{index}\n")
            return super().__getitem__(index)

    if samples:
        train.Windows = Noting
    return train


def _hush() -> None:
    """Progress is for people: what a rank prints goes nowhere (its errors still come up)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def copy_until(run: Path, step: int, to: Path) -> Path:
    """A run as it would stand had its job died right after committing ``step``."""
    shutil.copytree(run, to)
    for folder in to.glob("step-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    return to


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a nested state with its path; tensors as dtype, shape and bytes, so that == means bit-equal."""
    import torch

    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    elif isinstance(tree, torch.Tensor):
        return {
            path: (
                tree.dtype,
                tuple(tree.shape),
                tree.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            )
        }
    else:
        return {path: tree.hex() if isinstance(tree, float) else tree}
    return {name: leaf for key, value in items for name, leaf in leaves(value, f"{path}/{key}").items()}
