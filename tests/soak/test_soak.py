"""The soak in short; ``make soak`` is the whole of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ckpt
from tests.ranks import run_ranks
from tests.soak.supervising import GROWTH_NBYTES, MAX_FDS, Process, Soak


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 seconds of saves to failing storage, with kills and restarts: nothing lost, mixed, or left behind."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # and is put back afterwards
    seed = int(time.time())
    soak = Soak(tmp_path, seed=seed, every_s=0.3, calm_s=3.0)
    soak.run_for(20.0)
    table = "\n".join([f"seed {seed}", *(f"{what}: {figure}" for what, figure in soak.table())])
    assert not soak.wrong, "\n".join([*soak.wrong, table])
    assert soak.counts["committed"] >= 1, table
    assert soak.counts["steps read back"] >= 3, table


def save_step(rank: int, _world: int, run: str, step: int, replica: int) -> None:
    """A step as the soak's training saves it, if ``replica`` is the same number."""
    state = {
        "shard": torch.full((2000,), float(step)),
        "replica": torch.full((1000,), float(replica)),
        "count": step,
        "mine": ckpt.per_rank([rank, step]),
    }
    ckpt.save(run, step, state, wait=True)


@pytest.fixture
def soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Soak:
    """One that has not begun, on a run with step 5."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Soak(tmp_path, seed=1, every_s=1.0, calm_s=1.0)
    run_ranks(2, save_step, made.run, 5, 5)
    return made


def test_the_soak_sees_what_is_wrong_with_steps(soak: Soak) -> None:
    """Lost steps, a latest that goes back, steps that are mixed or damaged: each is said, and only then."""
    soak.told = {5: "w1.1"}
    assert soak._problems(soak.told) == []
    soak.told = {4: "w1.0", 5: "w1.1"}
    (lost,) = soak._problems(soak.told)
    assert lost == "step 4 (w1.0) was told to be committed and is lost; live: [5]"
    soak.told, soak.latest = {}, 6
    (back,) = soak._problems(soak.told)
    assert back == "the latest step went back from 6 to 5"
    run_ranks(2, save_step, soak.run, 6, 5)
    (mixed,) = soak._problems(soak.told)
    assert mixed.startswith("step 6 holds [5.0, 6.0]")
    for file in Path(soak.run).glob("step-00000006-*/state-*"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    assert any("step 6 cannot be read" in text for text in soak._problems(soak.told))


def test_the_soak_sees_what_is_wrong_with_the_job(soak: Soak) -> None:
    """A restored step that is mixed or older than what was told, memory and descriptors that grow: each is said."""
    (soak.folder / "journal-0001-0").write_text(
        '{"what": "committed", "step": 5, "attempt": "w1.1"}\n{"what": "restored", "step": 3, "uniform": false}\n{"wh'
    )
    process = soak.processes[0] = Process("a process", 0)  # which is none, so that nothing is measured
    process.warm_nbytes, process.nbytes, process.max_fds = 1, GROWTH_NBYTES + 2, MAX_FDS + 1
    soak._look()
    said = "\n".join(soak.wrong)
    assert "step 3 was restored, and is not of one step" in said
    assert "step 3 was restored, although 5 was told to be committed" in said
    assert "a process: its memory grew by 33,554,433 bytes" in said
    assert f"a process: {MAX_FDS + 1} descriptors" in said
    assert len(soak.wrong) == 4
