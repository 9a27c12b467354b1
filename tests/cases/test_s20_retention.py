"""S20: the old step is deleted after the new one is committed and was read back whole, and never the last good one."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.engine.load import read_step
from ckpt.plan.retention import KeepPolicy
from ckpt.run import Run
from ckpt.testing import store_env
from tests.ranks import run_ranks


def job(rank: int, world: int, run: str, steps: list[int], keep: KeepPolicy | None, flip: list[int]) -> list[str]:
    """A job that goes on with a run and saves steps, some of which are then damaged; what became of each save."""
    state = {"w": torch.zeros(5000), "n": 0}
    ends = []
    with contextlib.suppress(ckpt.CkptError), ckpt.Checkpointer(run, state, keep=keep) as checkpointer:
        for step in steps:
            state["w"].fill_(step)
            state["n"] = step
            try:
                result = checkpointer.save(step).result()
                ends.append("; ".join(result.warnings) or "ok")
            except ckpt.CkptError as error:
                ends.append(type(error).__name__)
            if step in flip:
                damage(run, step)
    return ends


def save(
    run: Path, *steps: int, keep: KeepPolicy | None, flip: list[int] | None = None, env: dict[str, str] | None = None
) -> list[str]:
    """The same, in a process and with a keeper of its own."""
    ends: list[str] = run_ranks(1, job, str(run), list(steps), keep, flip or [], env=env, process_group=False)[0]
    return ends


def damage(run: str | Path, step: int) -> None:
    """Flip one byte of a tensor."""
    path = next(Path(run).glob(f"step-{step:08d}-*/state-*"))
    raw = bytearray(path.read_bytes())
    raw[-7] ^= 4
    path.write_bytes(raw)


def failing(step: int) -> dict[str, str]:
    """The keeper's last file of a step's save does not fit on the disk."""
    spec = {"wrap": "faulty", "program": "keeper", "operation": "create", "errno": "ENOSPC"}
    return store_env({**spec, "match": f"step-{step:08d}-*/COMMIT"})


def assert_loads(run: Path, step: int) -> None:
    """The newest usable step is this one, whole."""
    state = {"w": torch.zeros(5000), "n": 0}
    assert ckpt.load(run, state).step == step
    assert torch.equal(state["w"], torch.full((5000,), float(step)))
    assert state["n"] == step


def test_s20_keep_one_and_a_save_that_fails_on_its_last_file(tmp_path: Path) -> None:
    """Step 1 is the only one there is, and stays; the next save that works replaces it."""
    run = tmp_path / "run"
    one = ckpt.keep(last=1)
    assert save(run, 1, 2, keep=one, env=failing(2)) == ["ok", "StoreError"]
    assert ckpt.steps(run) == [1]
    assert_loads(run, 1)
    assert save(run, 2, keep=one) == ["ok"]
    assert ckpt.steps(run) == [2]
    assert_loads(run, 2)


def test_s20_keep_two_with_a_damaged_newest_step(tmp_path: Path) -> None:
    """A failing save deletes nothing, so step 1 is there to fall back to; a good one makes it superfluous."""
    run = tmp_path / "run"
    assert save(run, 1, 2, 3, keep=ckpt.keep(last=2), flip=[2], env=failing(3)) == ["ok", "ok", "StoreError"]
    assert ckpt.steps(run) == [1, 2]
    assert_loads(run, 1)
    assert save(run, 2, 3, keep=ckpt.keep(last=2)) == ["ok", "ok"]
    assert ckpt.steps(run) == [2, 3]
    assert_loads(run, 3)


def test_s20_the_only_step_that_verifies_stays(tmp_path: Path) -> None:
    """What is written is damaged before it is read back, again and again: step 1 stays as long as nothing better is."""
    run = tmp_path / "run"
    assert save(run, 1, keep=None) == ["ok"]
    unreadable = store_env(
        {"wrap": "faulty", "program": "keeper", "operation": "read_into", "match": "*.safetensors", "errno": "EIO"}
    )
    for step, ends in ((2, [2]), (3, [3, 2])):
        (end,) = save(run, step, keep=ckpt.keep(last=1), env=unreadable)
        assert f"step {step} (w{step}.1) does not verify" in end
        assert "nothing was deleted" in end, ends
    assert ckpt.steps(run) == [1, 2, 3]
    assert save(run, 4, keep=ckpt.keep(last=1)) == ["ok"]
    assert ckpt.steps(run) == [4]


@pytest.mark.parametrize("policy", [None, ckpt.keep(), ckpt.keep(last=None)], ids=["none", "keep()", "last-none"])
def test_s20_no_policy_deletes_nothing(tmp_path: Path, policy: KeepPolicy | None) -> None:
    """None means: keep all."""
    run = tmp_path / "run"
    assert save(run, 1, 2, 2, 3, keep=policy) == ["ok"] * 4
    assert ckpt.steps(run) == [1, 2, 3]
    assert len(list(run.glob("step-*"))) == 4


@pytest.mark.parametrize("arguments", [
    {"last": 0}, {"last": -1}, {"last": True}, {"last": 1.0}, {"last": "3"}, {"last": 3, "every": 0},
    {"last": 3, "every": -1}, {"every": 10}, {"best": ckpt.best("loss")}, {"last": 3, "best": "loss"},
], ids=str)  # fmt: skip
def test_s20_what_means_nothing_is_refused(arguments: dict[str, Any]) -> None:
    """0 and -1 mean "all" to some and "none" to others."""
    with pytest.raises(ckpt.BadInputError, match="keep"):
        ckpt.keep(**arguments)


@pytest.mark.parametrize("arguments", [
    {"metric": ""}, {"metric": 3}, {"metric": "a\nb"}, {"metric": "x", "count": 0}, {"metric": "x", "mode": "least"},
], ids=str)  # fmt: skip
def test_s20_a_best_that_means_nothing_is_refused(arguments: dict[str, Any]) -> None:
    """A metric by name, a count from 1 on, and min or max."""
    with pytest.raises(ckpt.BadInputError, match="best"):
        ckpt.best(**arguments)


def test_s20_meanings_are_stated() -> None:
    """Where one looks for them."""
    text = ckpt.keep.__doc__ or ""
    assert all(word in text for word in ("last=None", "last=1", "0 and negative", "verified", "reader holds"))


def test_s20_retention_waits_for_a_reader(tmp_path: Path) -> None:
    """A reader that holds step 1 open reads all of it while saves go on; then it is deleted."""
    run = tmp_path / "run"
    assert save(run, 1, keep=None) == ["ok"]
    opened = Run.open(run)
    with opened.reading(1) as found:
        assert save(run, 2, 3, keep=ckpt.keep(last=1)) == ["ok", "ok"]
        assert ckpt.steps(run) == [1, 3]
        assert found.commit is not None
        assert read_step(opened, found.attempt, found.commit)["n"] == 1
    assert save(run, 4, keep=ckpt.keep(last=1)) == ["ok"]
    assert ckpt.steps(run) == [4]
    with pytest.raises(ckpt.NotFoundError, match="no live step 1; live steps: 4"):
        ckpt.read(run, step=1)


def measure(rank: int, world: int, run: str) -> list[int]:
    """Each rank has its own numbers, of all kinds; rank 0's are saved, and each with one step only."""
    state = {"n": 0}
    best = ckpt.best("loss", count=2)
    with ckpt.Checkpointer(run, state, every=ckpt.every(steps=1), keep=ckpt.keep(last=1, best=best)) as checkpointer:
        for step in checkpointer.steps(total=8):
            if step != 6:
                loss = [0, 9, 3, math.nan, 2, 0, 3, 8][step - 1] + 100 * rank + (step == 1) * 50
                checkpointer.metrics["loss"] = [torch.tensor(loss), np.float32(loss), loss][step % 3]
    return ckpt.steps(run)


def test_s20_the_best_steps_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks: the two least losses (of equals the newer) and the newest step stay; `ckpt ls` shows them."""
    run = tmp_path / "run"
    assert run_ranks(2, measure, str(run)) == [[5, 7, 8]] * 2
    assert [Run.open(run).metrics(s.attempt, s.commit)["loss"] for s in Run.open(run).survey().live] == [2.0, 3.0, 8.0]
    assert main(["ls", str(run)]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    at = head.index("loss")
    assert [row[at : at + 4].strip() for row in rows] == ["2", "3", "8"]


def test_s20_metrics_that_are_none_are_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """By name; and NaN and the infinities are numbers like any other."""
    run = tmp_path / "run"
    for bad in ({"loss": "1.0"}, {"loss": None}, {"loss": torch.zeros(2)}, {"": 1.0}, {3: 1.0}, {"loss": 10**400}, [1]):
        with pytest.raises(ckpt.BadInputError, match="metrics"):
            ckpt.save(run, 1, {"n": 1}, metrics=bad, wait=True)  # type: ignore[arg-type]
    assert not run.exists()
    metrics = {"loss": math.nan, "low": -math.inf, "high": math.inf, "count": 3, "flag": np.float16(0.5)}
    ckpt.save(run, 1, {"n": 1}, metrics=metrics, wait=True)
    found = Run.open(run).find(1)
    assert found.commit is not None
    assert str(Run.open(run).metrics(found.attempt, found.commit)) == str(
        {"count": 3.0, "flag": 0.5, "high": math.inf, "loss": math.nan, "low": -math.inf}
    )
    assert ckpt.verify(run).ok
