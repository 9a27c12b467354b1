"""A run goes on with another number of ranks: the same state when gathered, and no sample lost or read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.ranks import run_ranks
from tests.trainer.jobs import SAMPLES, TINY, leaves, shortened, train

BATCH = 12
STEPS_EACH = 4


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("worlds", [(4, 2, 3), (2, 1)], ids=["4-2-3", "2-1"])
def test_another_number_of_ranks(parallel: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    """Each change of the world keeps every bit of the state, and each sample of an epoch is read exactly once."""
    run = tmp_path / "run"
    options = [f"--parallel={parallel}", "--every=100"]
    read: list[int] = []
    for start, world in enumerate(worlds):
        if start:
            stored = leaves(ckpt.read(run))
            gathered = run_ranks(world, _gather, [*TINY, *options, f"--run={run}"])[0]
            assert gathered == {name: stored[name] for name in gathered}
            assert {name for name in stored if name.startswith("/model")} <= set(gathered)
        samples = tmp_path / f"samples-{start}"
        train(world, run, *options, f"--steps={STEPS_EACH * (start + 1)}", samples=samples)
        notes = list(tmp_path.glob(f"{samples.name}-*"))
        assert len(notes) == world
        share = STEPS_EACH * BATCH // world
        for note in notes:
            mine = [int(line) for line in note.read_text().splitlines()]
            assert len(mine) == share
            read += mine
    epoch, rest = read[:SAMPLES], read[SAMPLES:]
    assert sorted(set(epoch)) == sorted(epoch)
    assert rest == sorted(set(rest))


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
    model = {k.removeprefix("module."): whole(v).detach() for k, v in job.model.state_dict().items()}
    return leaves({"model": model, "scheduler": job.scheduler.state_dict(), "data": job.loader.state_dict()})
