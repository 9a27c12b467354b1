"""Saving a step that exists: with the same values, with others, by another writer, and after damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.session import session_of
from ckpt.format.commit import Attempt
from ckpt.run import Run


def save(run: Path, step: int, value: float, *, keep: int | None = None) -> str:
    """One save of a job; its attempt."""
    state = {"w": torch.full((3000,), value), "n": value}
    checkpointer = ckpt.Checkpointer(run, state, keep=ckpt.keep(last=keep))
    checkpointer._session = session_of(run)
    attempt = checkpointer.save(step).result().attempt
    assert ckpt.read(run, step=step)["n"] == value
    return attempt


def states(run: Path) -> dict[str, str]:
    return {attempt.label: state for attempt, (state, _) in Run.open(run).survey().states.items()}


def load(run: Path) -> tuple[int, float]:
    """The step that a job goes on from, and its value; from then on its saves are a new writer's."""
    state = {"w": torch.zeros(3000), "n": 0.0}
    report = ckpt.load(run, state)
    assert torch.equal(state["w"], torch.full((3000,), state["n"]))
    return report.step, state["n"]


@pytest.mark.parametrize("second", [1.0, 2.0], ids=["same-values", "other-values"])
@pytest.mark.parametrize("keep", [None, 1])
def test_again_by_the_same_writer(tmp_path: Path, second: float, keep: int | None) -> None:
    """The newer attempt stands for the step at once; the older stays whole, or goes when the newer is read back."""
    run = tmp_path / "run"
    assert save(run, 5, 1.0, keep=keep) == "w1.1"
    assert save(run, 5, second, keep=keep) == "w1.2"
    assert states(run) == ({"w1.1": "superseded", "w1.2": "live"} if keep is None else {"w1.2": "live"})
    assert ckpt.steps(run) == [5]
    assert load(run) == (5, second)


def test_again_by_another_writer(tmp_path: Path) -> None:
    """A job that goes on from step 5 and saves it again stands for it; the first job's next save is refused."""
    run = tmp_path / "run"
    save(run, 5, 1.0)
    older = session_of(run).writer
    assert load(run) == (5, 1.0)
    session_of(run).writer = None  # as a job of its own would begin
    assert save(run, 5, 2.0) == "w2.1"
    assert states(run) == {"w1.1": "superseded", "w2.1": "live"}
    session_of(run).writer = older
    session_of(run)._saves = 1
    with pytest.raises(ckpt.FencedError, match="writer 2 holds the run"):
        save(run, 5, 3.0)
    assert states(run) == {"w1.1": "superseded", "w2.1": "live"}
    assert load(run) == (5, 2.0)


def test_an_earlier_step_is_refused(tmp_path: Path) -> None:
    """Within a line step numbers never decrease: it would not be the latest, and nobody would know why."""
    run = tmp_path / "run"
    save(run, 5, 1.0)
    with pytest.raises(ckpt.BadInputError, match="step 4 is before step 5"):
        save(run, 4, 2.0)
    assert states(run) == {"w1.1": "live"}


def test_again_after_damage(tmp_path: Path) -> None:
    """The job falls back to 4, and saves its own 5; the damaged one is abandoned, whatever it looks like later."""
    run = tmp_path / "run"
    save(run, 4, 4.0)
    save(run, 5, 5.0)
    flip(run, "step-00000005-w1.2")
    assert load(run) == (4, 4.0)
    assert save(run, 5, 5.5, keep=2) == "w2.1"
    assert states(run) == {"w1.1": "live", "w1.2": "abandoned", "w2.1": "live"}
    assert ckpt.verify(run, 5).ok
    flip(run, "step-00000005-w1.2")  # as it was before
    assert load(run) == (5, 5.5)
    assert Run.open(run).find(5).attempt == Attempt(5, 2, 1)


def flip(run: Path, folder: str) -> None:
    """One bit of a tensor."""
    path = next((run / folder).glob("state-*"))
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
