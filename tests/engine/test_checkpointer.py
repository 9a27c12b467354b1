"""The context manager: restores, yields what is left, saves when due, stops on SIGTERM, drains, and hides nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.keeper.client import statuses
from ckpt.plan.retention import KeepPolicy
from ckpt.testing import store_env
from tests.ranks import run_ranks


def loop(
    run: str, total: int, *, every: int = 2, seen: list[int] | None = None, keep: KeepPolicy | None = None
) -> list[int]:
    """A loop that counts in a tensor; gives the steps it was yielded."""
    state = {"w": torch.zeros(3), "note": "new"}
    steps = [] if seen is None else seen
    with ckpt.Checkpointer(run, state, every=ckpt.every(steps=every), keep=keep) as checkpointer:
        for step in checkpointer.steps(total=total):
            assert state["w"][0] == step - 1
            state["w"] += 1
            state["note"] = f"after {step}"
            steps.append(step)
    return steps


def test_yields_what_is_left_and_saves_the_last(tmp_path: Path) -> None:
    """1 … 5, then 6 … 7, then nothing; due steps and the last one are saved."""
    run = str(tmp_path / "run")
    assert loop(run, 5) == [1, 2, 3, 4, 5]
    assert ckpt.steps(run) == [2, 4, 5]
    assert loop(run, 7) == [6, 7]
    assert loop(run, 7) == []
    assert ckpt.steps(run) == [2, 4, 5, 6, 7]
    assert ckpt.read(run)["note"] == "after 7"


def test_keep_deletes_older_steps_after_the_commit(tmp_path: Path) -> None:
    """The newest two stay."""
    run = str(tmp_path / "run")
    loop(run, 6, every=1, keep=ckpt.keep(last=2))
    assert ckpt.steps(run) == [5, 6]
    assert len(list((tmp_path / "run").glob("step-*"))) == 2


@pytest.mark.parametrize("wrong", [{"last": 0}, {"last": -1}, {"every": 5}, {"last": True}])
def test_a_meaningless_keep_is_refused(wrong: dict[str, int]) -> None:
    """0 and negative numbers, and every without last."""
    with pytest.raises(ckpt.BadInputError, match="keep"):
        ckpt.keep(**wrong)


def test_random_states_take_effect_when_the_first_step_begins(tmp_path: Path) -> None:
    """Numbers drawn between entering and the first step leave no trace."""
    run = str(tmp_path / "run")

    def draw(total: int, noise: int) -> list[float]:
        torch.manual_seed(3)
        found = []
        with ckpt.Checkpointer(run, {"x": 1}, every=ckpt.every(steps=1)) as checkpointer:
            torch.rand(noise)
            found.extend(torch.rand(1).item() for _ in checkpointer.steps(total=total))
        return found

    first = draw(3, noise=0)
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(6)]
    assert first == expected[:3]
    assert draw(6, noise=17) == expected[3:]


def test_sigterm_saves_at_the_next_boundary_and_raises_preempted(tmp_path: Path) -> None:
    """One process: the step that was running is saved, the rest is left for the next start."""
    run = str(tmp_path / "run")

    def job() -> None:
        state = {"w": torch.zeros(1)}
        with ckpt.Checkpointer(run, state) as checkpointer:
            for step in checkpointer.steps(total=100):
                state["w"] += 1
                if step == 3:
                    assert not checkpointer.stopping
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert checkpointer.stopping

    with pytest.raises(ckpt.Preempted, match="step 3") as caught:
        job()
    assert caught.value.code == 75
    assert ckpt.latest(run) == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def preempted(rank: int, world: int, run: str) -> tuple[int, int]:
    """Only rank 1 gets the signal; the steps seen, and the exit code."""
    seen: list[int] = []
    state = {"w": torch.zeros(1)}
    try:
        with ckpt.Checkpointer(run, state, every=ckpt.every(steps=50)) as checkpointer:
            for step in checkpointer.steps(total=100):
                state["w"] += 1
                seen.append(step)
                torch.distributed.barrier()
                if step == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    except ckpt.Preempted as stopped:
        return seen[-1], stopped.exit_code
    return seen[-1], 0


def test_sigterm_on_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    """The flag travels one step: all ranks save step 4 and stop with the documented code."""
    run = str(tmp_path / "run")
    assert run_ranks(2, preempted, run) == [(4, 75), (4, 75)]
    assert ckpt.steps(run) == [4]


def failing(rank: int, world: int, run: str, env: dict[str, str]) -> tuple[str, str, list[int]]:
    """The store fails on the second save."""
    seen: list[int] = []
    try:
        loop(run, 6, seen=seen)
    except ckpt.CkptError as error:
        return type(error).__name__, str(error), seen
    return "", "", seen


def test_a_failed_save_is_raised_and_the_step_before_stays(tmp_path: Path) -> None:
    """No failure is silent: it is raised at the next save, or when the loop ends."""
    run = str(tmp_path / "run")
    env = store_env(
        {
            "wrap": "faulty",
            "match": "COMMIT",
            "operation": "create",
            "errno": "ENOSPC",
            "on_nth": 2,
            "program": "keeper",
        }
    )
    for kind, message, seen in run_ranks(2, failing, run, env, env=env):
        assert kind in {"StoreError", "RankError"}, message
        assert "No space left" in message or "no space left" in message
        assert len(seen) >= 4
    steps = ckpt.steps(run)
    assert steps[0] == 2
    assert 4 not in steps


def test_an_exception_in_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    """What was staged is still committed; the interrupted step is not saved."""
    run = str(tmp_path / "run")

    def job() -> None:
        with ckpt.Checkpointer(run, {"x": 1}, every=ckpt.every(steps=2)) as checkpointer:
            for step in checkpointer.steps(total=10):
                if step == 5:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    assert ckpt.steps(run) == [2, 4]


def test_the_callers_own_rng_key_is_refused(tmp_path: Path) -> None:
    """Its random states would silently not be kept."""
    with pytest.raises(ckpt.BadInputError, match="rng"):
        ckpt.Checkpointer(str(tmp_path), {"rng": 5})


def test_a_run_begun_with_save_can_be_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no random states; that is said, and all else is restored."""
    run = str(tmp_path / "run")
    ckpt.save(run, 3, {"w": torch.full((3,), 3.0), "note": "saved"}, wait=True)
    assert loop(run, 5) == [4, 5]
    assert "restored step 3 (w1.1)" in capsys.readouterr().err
    assert ckpt.steps(run) == [3, 4, 5]


@pytest.mark.parametrize("restored", [False, True])
def test_memory_for_saves_is_there_before_the_first_one(tmp_path: Path, restored: bool) -> None:
    """After a restore, or the first step of a new run, both arenas come in the background."""
    run = str(tmp_path / "run")
    if restored:
        loop(run, 1)
    seen = []
    with ckpt.Checkpointer(run, {"w": torch.zeros(3), "note": "new"}) as checkpointer:
        for step in checkpointer.steps(total=3 + restored):
            assert checkpointer.pending is None
            if step == 2 + restored:
                deadline = time.monotonic() + 20
                while len(seen) < 2 and time.monotonic() < deadline:
                    seen = [a for s in statuses() for a in s.arenas if (a.run, a.state) == (run, "free")]
                    time.sleep(0.005)
    assert len(seen) == 2
    assert ckpt.steps(run)[-1] == 3 + restored
