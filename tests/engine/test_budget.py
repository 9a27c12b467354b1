"""Memory for snapshots that cannot be had: said before training, refused after the first step, and nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.ranks import run_ranks

ARENA_NBYTES = 4 << 20  # what one snapshot of a rank takes, in whole huge pages: 2.1 MB with AdamW's moments


def make() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model of 0.7 MB and its optimizer, which has no state yet."""
    torch.manual_seed(0)
    model = nn.Linear(420, 420)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, {"model": model, "optimizer": optimizer}


def train(run: str, total: int, **options: Any) -> None:
    """A loop that saves at every second step."""
    model, optimizer, state = make()
    with ckpt.Checkpointer(run, state, every=ckpt.every(steps=2), **options) as checkpointer:
        for _ in checkpointer.steps(total=total):
            model(torch.randn(2, 420)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Where to save to."""
    return str(tmp_path / "run")


def test_too_small_a_budget_is_said_and_then_refused(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first step on standard error; after it, when the moments are there, by an error."""
    with pytest.raises(ckpt.KeeperError, match=r"no memory for 2 snapshots of each rank of this node: .*snapshots=1"):
        train(run, 4, budget_bytes=2 * ARENA_NBYTES - 1)
    said = capsys.readouterr().err
    assert "as far as can be told before the first step" in said
    assert f"budget_bytes allows {2 * ARENA_NBYTES - 1:,}" in said
    assert ckpt.steps(run) == []


def test_a_budget_that_suffices(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To the byte, with two snapshots and with one."""
    train(run, 4, budget_bytes=2 * ARENA_NBYTES)
    train(run, 8, budget_bytes=ARENA_NBYTES, snapshots=1)
    assert ckpt.steps(run) == [2, 4, 6, 8]
    assert "no memory" not in capsys.readouterr().err


def test_a_resumed_job_is_refused_before_its_first_step(run: str) -> None:
    """Its optimizer has its state once the step is restored."""
    train(run, 2)
    _, _, state = make()
    with pytest.raises(ckpt.KeeperError, match="budget_bytes allows 5"):
        ckpt.Checkpointer(run, state, budget_bytes=5).__enter__()
    assert ckpt.steps(run) == [2]


def test_a_plain_save_is_refused_before_a_byte_is_written(run: str) -> None:
    """And the next one, with a budget that suffices, works."""
    state = {"w": torch.ones(1 << 20)}
    with pytest.raises(ckpt.KeeperError, match="budget_bytes allows 1,000"):
        ckpt.save(run, 1, state, budget_bytes=1000)
    assert not list(Path(run).glob("step-*/*"))
    ckpt.save(run, 1, state, budget_bytes=8 << 20).result(60)
    ckpt.load(run, state)


def refused_on_one(rank: int, world: int, run: str) -> str:
    """Two ranks of one node, whose arenas are reckoned together."""
    state = {"own": ckpt.per_rank(torch.ones(1 << 20))}
    with (
        pytest.raises(ckpt.CkptError) as caught,
        ckpt.Checkpointer(run, state, budget_bytes=(16 << 20) - 1) as checkpointer,
    ):
        list(checkpointer.steps(total=5))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_the_ranks_of_a_node_share_the_budget(tmp_path: Path) -> None:
    """Four arenas of 4 MiB do not fit into one byte less than 16 MiB, and both ranks are told."""
    for told in run_ranks(2, refused_on_one, str(tmp_path / "run")):
        assert told.startswith("KeeperError: no memory for 2 snapshots of each rank of this node")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"snapshots": 3}, "snapshots=3: expected 2, or 1"),
        ({"snapshots": True}, "snapshots=True"),
        ({"budget_bytes": 0}, "budget_bytes 0"),
        ({"budget_bytes": 1.5}, "budget_bytes 1.5"),
        ({"max_write_mbps": 0}, "max_write_mbps=0: expected a number above 0"),
        ({"max_write_mbps": "fast"}, "max_write_mbps='fast'"),
        ({"max_write_mbps": float("inf")}, "max_write_mbps=inf"),
        ({"progress_timeout_s": -1}, "progress_timeout_s=-1"),
        ({"encode": "lz4"}, "encode='lz4': expected one of raw, zstd"),
    ],
    ids=str,
)
def test_options_are_checked_at_once(options: dict[str, Any], told: str, run: str) -> None:
    """By both ways to give them, before anything is made."""
    with pytest.raises(ckpt.BadInputError, match="expected") as caught:
        ckpt.save(run, 1, {"w": torch.ones(1)}, **options)
    assert told in str(caught.value)
    with pytest.raises(ckpt.BadInputError) as caught:
        ckpt.Checkpointer(run, {"w": torch.ones(1)}, **options)
    assert told in str(caught.value)
    assert not Path(run).exists()


def test_a_bandwidth_cap_is_kept(run: str) -> None:
    """8 MB at 8 MB/s take a second or so, and never much less: the first burst is free."""
    report = ckpt.save(run, 1, {"w": torch.ones(4 << 20)}, max_write_mbps=8).result(60)
    assert report.write_s >= 0.9
