"""A run goes on with another number of ranks: the same state when gathered, and no sample lost or read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.ranks import run_ranks
from tests.trainer.jobs import SAMPLES, TINY, leaves, shortened, train
from trainer.journal import read_losses

EPOCH = 9  # steps of 12 sequences in which the 100 samples are read, the last step having 4 of them


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("course", [{3: 4, 6: 2, EPOCH: 3}, {4: 2, EPOCH: 1}], ids=["4-2-3", "2-1"])
def test_another_number_of_ranks(parallel: str, course: dict[int, int], tmp_path: Path) -> None:
    """Each change of the world keeps every bit of the state, and an epoch's samples are read exactly once."""
    run = tmp_path / "run"
    options = [f"--parallel={parallel}", "--every=100"]
    for until, world in course.items():
        if run.exists():
            stored = leaves(ckpt.read(run))
            gathered = run_ranks(world, _gather, [*TINY, *options, f"--run={run}"])
            assert all(rank == gathered[0] for rank in gathered)
            assert gathered[0] == {name: leaf for name, leaf in stored.items() if not name.startswith("/rng")}
        train(world, run, *options, f"--steps={until}", samples=tmp_path / f"samples-{world}")
    notes = list(tmp_path.glob("samples-*"))
    assert len(notes) == sum(course.values())
    read = [int(line) for note in notes for line in note.read_text().splitlines()]
    assert sorted(read) == list(range(SAMPLES))


def test_the_number_of_ranks_changes_nothing_but_rounding(tmp_path: Path) -> None:
    """One rank, three that share unequally, and three that accumulate empty pieces: the same losses to six digits."""
    courses: dict[str, tuple[int, list[str]]] = {
        "one": (1, []),
        "ddp": (3, ["--parallel=ddp"]),
        "fsdp": (3, ["--parallel=fsdp", "--accumulate=2"]),
    }
    losses = {}
    for name, (world, options) in courses.items():
        train(world, tmp_path / name, *options, "--dropout=0", "--every=100", losses=tmp_path / f"{name}.losses")
        losses[name] = [float.fromhex(loss) for loss in read_losses(tmp_path / f"{name}.losses").values()]
    assert len(losses["one"]) == 12
    assert losses["ddp"] == pytest.approx(losses["one"], rel=1e-6)
    assert losses["fsdp"] == pytest.approx(losses["one"], rel=1e-6)


def _gather(rank: int, world: int, argv: list[str]) -> dict[str, Any]:
    """What a rank of this world holds after loading, pieces put together: leaves by the names that ckpt.read gives."""
    import torch
    from torch.distributed.tensor import DTensor

    from trainer.options import parse
    from trainer.parallel import Place

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    job = shortened().assemble(parse(argv), Place(rank, world, torch.device("cpu")))
    ckpt.load(parse(argv).run, job.state)
    optimizer = job.optimizer
    names = {parameter: f"model.{name.removeprefix('module.')}" for name, parameter in job.model.named_parameters()}
    found = {
        "model": {name.removeprefix("module."): whole(value) for name, value in job.model.state_dict().items()},
        "optimizer": {
            "state": {names[p]: {key: whole(x) for key, x in state.items()} for p, state in optimizer.state.items()},
            "param_groups": [
                {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
            ],
        },
        "scheduler": job.scheduler.state_dict(),
        "data": job.loader.state_dict(),
    }
    return leaves(found)
