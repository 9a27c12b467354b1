"""S11: a job goes on with more ranks or fewer, and with its tensors cut another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from tests.distributed.models import assert_equal, gathered
from tests.ranks import run_ranks

CHAIN = (4, 1, 2, 3, 6, 4)


class Halves(nn.Module):
    """Two layers of sizes that no number of ranks here divides."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 7) to (N, 3)."""
        return self.second(torch.tanh(self.first(x)))


def job(world: int, seed: int) -> dict[str, Any]:
    """Model (sharded, but for a single rank), optimizer, scheduler and plain values."""
    torch.manual_seed(seed)
    model = Halves()
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": seed, "seen": torch.tensor(seed)}


def train(state: dict[str, Any], steps: int, seed: int) -> None:
    """Steps on a fixed batch; every rank sees the whole batch, so the world size changes rounding only."""
    for step in range(steps):
        batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(seed + step))
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()


def look(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All there is, whole: parameters, moments and steps, learning rate and plain values."""
    return gathered(state["model"], state["optimizer"]) | {
        "lr": torch.tensor(state["optimizer"].param_groups[0]["lr"], dtype=torch.float64),
        "scheduler": torch.tensor(state["scheduler"].last_epoch),
        "epoch": torch.tensor(state["epoch"]),
        "seen": state["seen"],
    }


def go_on(rank: int, world: int, source: str | None, target: str) -> Any:
    """Load (the first job trains), look, save elsewhere; then one more step, and look again."""
    state = job(world, seed=3 if source is None else 77)
    if source is None:
        train(state, 3, seed=5)
    else:
        ckpt.load(source, state)
    before = look(state)
    ckpt.save(target, 3, state, wait=True)
    train(state, 1, seed=50)
    after = look(state)
    return (before, after) if rank == 0 else None


def test_s11_any_world_size_loads_any_other(tmp_path: Path) -> None:
    """Saved by 4 ranks, then by 1, 2, 3, 6 and 4 in turn: bit-equal, and the next step as on one rank."""
    found = []
    for number, world in enumerate(CHAIN):
        source = str(tmp_path / str(number - 1)) if number else None
        found.append(run_ranks(world, go_on, source, str(tmp_path / str(number)))[0])
    expected, _ = found[0]
    assert {"first.weight/exp_avg", "first.weight/exp_avg_sq", "second.bias/step", "lr", "seen"} <= set(expected)
    assert expected["second.bias/step"] == 3
    _, stepped_alone = found[CHAIN.index(1)]
    assert stepped_alone["second.bias/step"] == 4
    assert not torch.equal(stepped_alone["first.weight"], expected["first.weight"])
    for loaded, stepped in found:
        assert_equal(loaded, expected)
        for name, value in stepped_alone.items():
            torch.testing.assert_close(stepped[name], value, msg=lambda m, n=name: f"{n}: {m}")


COLUMNS_THEN_ROWS = {"first": ColwiseParallel(), "second": RowwiseParallel()}
ROWS_THEN_COLUMNS = {"first": RowwiseParallel(), "second": ColwiseParallel()}


def save_by_columns(rank: int, world: int, run: str) -> Any:
    """The first layer cut by its outputs, the second by its inputs."""
    torch.manual_seed(3)
    model = parallelize_module(Halves(8), init_device_mesh("cpu", (world,)), COLUMNS_THEN_ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.ones(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ckpt.save(run, 3, {"model": model, "optimizer": optimizer}, wait=True)
    state = gathered(model, optimizer)
    return state if rank == 0 else None


def load_by_rows(rank: int, world: int, run: str) -> Any:
    """The other way round."""
    model = parallelize_module(Halves(8), init_device_mesh("cpu", (world,)), ROWS_THEN_COLUMNS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt.load(run, {"model": model, "optimizer": optimizer})
    placements = str(model.first.weight.placements), str(model.second.weight.placements)
    state = gathered(model, optimizer)
    return (state, placements) if rank == 0 else None


@pytest.mark.parametrize("world", [2, 3])
def test_s11_columns_load_as_rows(tmp_path: Path, world: int) -> None:
    """Tensors cut along one dimension by 2 ranks are read cut along the other one, by as many ranks and by more."""
    expected = run_ranks(2, save_by_columns, str(tmp_path / "run"))[0]
    state, placements = run_ranks(world, load_by_rows, str(tmp_path / "run"))[0]
    assert placements == ("(Shard(dim=1),)", "(Shard(dim=0),)")
    assert_equal(state, expected)


class Cursor:
    """A stream's position of each rank, which other numbers of ranks can share out anew."""

    def __init__(self, read: list[int]) -> None:
        self.read = read
        self.shared_by: list[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What this rank has read."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """At the same world size."""
        self.read = state["read"]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """At another one: all ranks' positions, in rank order."""
        self.shared_by = [state["read"] for state in states]


def save_own(rank: int, world: int, run: str) -> None:
    """One own value that can be shared out, one that cannot, and one for all."""
    cursor = ckpt.per_rank(Cursor([rank, rank * 10]))
    ckpt.save(run, 1, {"w": torch.ones(3), "cursor": cursor, "offset": ckpt.per_rank(rank)}, wait=True)


def load_own(rank: int, world: int, run: str) -> Any:
    """With what cannot be shared out, then without."""
    state = {"w": torch.zeros(3), "cursor": ckpt.per_rank(Cursor([])), "offset": ckpt.per_rank(-1)}
    refusal, offset = "", state["offset"]
    try:
        ckpt.load(run, state)
    except ckpt.BadInputError as error:
        refusal = str(error)
    untouched = state["w"].tolist() == [0.0] * 3 and state["offset"].value == -1
    if refusal:
        del state["offset"]
        ckpt.load(run, state)
    cursor = state["cursor"].value
    return refusal, untouched, state["w"].tolist(), offset.value, cursor.read, cursor.shared_by


@pytest.mark.parametrize("world", [1, 3])
def test_s11_values_of_each_rank_have_a_policy(tmp_path: Path, world: int) -> None:
    """On more ranks and on fewer: all ranks' states for who can share them out, else a refusal that names the key."""
    run = str(tmp_path / "run")
    run_ranks(2, save_own, run)
    for refusal, untouched, w, _, read, shared_by in run_ranks(world, load_own, run):
        assert refusal.startswith(f"offset: each of 2 ranks saved its own, and this job has {world}")
        assert untouched
        assert w == [1.0] * 3
        assert (read, shared_by) == ([], [[0, 0], [1, 10]])


def test_s11_values_of_each_rank_return_to_it(tmp_path: Path) -> None:
    """On as many ranks, nothing is refused and each has its own again."""
    run = str(tmp_path / "run")
    run_ranks(2, save_own, run)
    for rank, (refusal, _, w, offset, read, shared_by) in enumerate(run_ranks(2, load_own, run)):
        assert (refusal, w, offset, read, shared_by) == ("", [1.0] * 3, rank, [rank, rank * 10], None)
