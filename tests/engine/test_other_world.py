"""A job of another size reads the parts that it needs something of, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.engine.load import stored_state
from ckpt.errors import DamagedError
from ckpt.reading.step import StepReader
from ckpt.run import Run
from ckpt.store import open_store
from ckpt.testing import RecordingStore
from ckpt.testing.handmade import HandTensor, RankOwn, filled, write_step

WORLD = 5


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    """A run of one step by 5 ranks, each with a value and a tensor of its own."""
    own = [
        RankOwn({"seen": {"rank": rank}}, (HandTensor("own", "float32", (2,), filled((2,), "float32", rank)),))
        for rank in range(WORLD)
    ]
    store = RecordingStore(open_store(tmp_path / "run"))
    tensors = [HandTensor("w", "float32", (10, 2), filled((10, 2), "float32"), mesh=(WORLD,), placements=("S0",))]
    write_step(Run(store), 1, tensors, world=WORLD, values={"epoch": 3}, own=own)
    store.done.clear()
    return store


def parts_read(store: RecordingStore) -> list[str]:
    """The names of the parts that were read, in order."""
    return [done.key.rpartition("/")[2] for done in store.done if done.op == "get" and "/part-" in done.key]


def test_what_nobody_asks_for_is_not_read(store: RecordingStore) -> None:
    """To know what a step has, one part is enough: the one that carries the values."""
    stored = stored_state(StepReader.open(Run(store)), 0, WORLD - 1)
    assert stored.all_rank_values is not None
    assert len(stored.all_rank_values) == WORLD
    assert parts_read(store) == ["part-00000-of-00005.json"]


def test_what_is_asked_for_is_read_once(store: RecordingStore) -> None:
    """A rank's own values and tensors come of one reading of its part."""
    stored = stored_state(StepReader.open(Run(store)), 0, WORLD - 1)
    assert stored.all_rank_values is not None
    assert stored.all_rank_tensors is not None
    for _ in range(2):
        assert list(stored.all_rank_values) == [{"seen": {"rank": rank}} for rank in range(WORLD)]
        assert [tensors["own"].shape for tensors in stored.all_rank_tensors] == [(2,)] * WORLD
    others = [f"part-{rank:05d}-of-00005.json" for rank in range(1, WORLD)]
    assert [name for name in parts_read(store) if name != "part-00000-of-00005.json"] == others


def test_damage_is_met_where_it_matters(store: RecordingStore) -> None:
    """A rank's part that is gone is an error for who needs what that rank had of its own, and for nobody else."""
    (step,) = [name for name in store.list() if name.startswith("step-")]
    store.delete(f"{step}/part-00003-of-00005.json")
    stored: Any = stored_state(StepReader.open(Run(store)), 0, WORLD - 1)
    assert stored.all_rank_values[2] == {"seen": {"rank": 2}}
    with pytest.raises(DamagedError, match="part-00003-of-00005"):
        list(stored.all_rank_values)
