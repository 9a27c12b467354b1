"""A run that was stopped anywhere and went on is the run that never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ckpt
from tests.trainer.jobs import copy_until, leaves, train
from trainer.journal import read_losses

STEPS = 12


class Undisturbed(NamedTuple):
    parallel: str
    run: Path
    losses: dict[int, str]
    final: dict[str, Any]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Twelve steps on two ranks, every step saved and kept."""
    folder = tmp_path_factory.mktemp(request.param)
    run, losses = folder / "run", folder / "losses"
    train(2, run, f"--parallel={request.param}", losses=losses)
    assert ckpt.steps(run) == list(range(1, STEPS + 1))
    return Undisturbed(request.param, run, read_losses(losses), leaves(ckpt.read(run)))


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resumed_at_any_step(undisturbed: Undisturbed, step: int, tmp_path: Path) -> None:
    """Losses of the steps that were left, and every tensor and value of the final state, are bit-equal."""
    run = copy_until(undisturbed.run, step, tmp_path / "run")
    train(2, run, f"--parallel={undisturbed.parallel}", losses=tmp_path / "losses")
    assert read_losses(tmp_path / "losses") == {k: v for k, v in undisturbed.losses.items() if k > step}
    assert leaves(ckpt.read(run)) == undisturbed.final


def test_a_finished_run_does_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Started once more, it logs no step and writes none."""
    run = copy_until(undisturbed.run, STEPS, tmp_path / "run")
    train(2, run, f"--parallel={undisturbed.parallel}", losses=tmp_path / "losses")
    assert read_losses(tmp_path / "losses") == {}
    assert ckpt.steps(run) == list(range(1, STEPS + 1))


def test_saving_changes_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """A run that saves at its end only has the losses and the final state of one that saves every step."""
    train(2, tmp_path / "run", f"--parallel={undisturbed.parallel}", "--every=12", losses=tmp_path / "losses")
    assert ckpt.steps(tmp_path / "run") == [STEPS]
    assert read_losses(tmp_path / "losses") == undisturbed.losses
    assert leaves(ckpt.read(tmp_path / "run")) == undisturbed.final


def test_saves_that_overlap_training_change_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Neither the losses nor any step that was saved while the next one computed."""
    train(2, tmp_path / "run", f"--parallel={undisturbed.parallel}", "--overlap", losses=tmp_path / "losses")
    assert read_losses(tmp_path / "losses") == undisturbed.losses
    for step in (1, 5, STEPS):
        assert leaves(ckpt.read(tmp_path / "run", step=step)) == leaves(ckpt.read(undisturbed.run, step=step))


@pytest.mark.parametrize("options", [["--bf16"], ["--accumulate=3"]])
def test_resumed_with(undisturbed: Undisturbed, options: list[str], tmp_path: Path) -> None:
    """Computing in bfloat16 and accumulating gradients change the numbers, not that they come again."""
    options = [*options, f"--parallel={undisturbed.parallel}", "--every=5"]
    train(2, tmp_path / "whole", *options, losses=tmp_path / "losses")
    whole = read_losses(tmp_path / "losses")
    assert whole != undisturbed.losses
    run = copy_until(tmp_path / "whole", 5, tmp_path / "run")
    train(2, run, *options, losses=tmp_path / "again")
    assert read_losses(tmp_path / "again") == {k: v for k, v in whole.items() if k > 5}
    assert leaves(ckpt.read(run)) == leaves(ckpt.read(tmp_path / "whole"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_more_than_two_ranks_add_up_alike(parallel: str, tmp_path: Path) -> None:
    """With three ranks the order of additions shows in the last bit; a resumed run keeps to it."""
    options = [f"--parallel={parallel}", "--every=5"]
    train(3, tmp_path / "whole", *options, losses=tmp_path / "losses")
    run = copy_until(tmp_path / "whole", 5, tmp_path / "run")
    train(3, run, *options, losses=tmp_path / "again")
    assert read_losses(tmp_path / "again") == {k: v for k, v in read_losses(tmp_path / "losses").items() if k > 5}
    assert leaves(ckpt.read(run)) == leaves(ckpt.read(tmp_path / "whole"))
