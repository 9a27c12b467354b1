"""The trainer as a person starts it: real processes, real signals, real exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckpt
from tests.trainer.jobs import TINY
from trainer.journal import read_losses

ROOT = Path(__file__).parents[2]
LONG_S = 90.0


def start(*arguments: str, ranks: int | None = None) -> subprocess.Popen[str]:
    """``python -m trainer``, or the same under torchrun."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, "-m", "trainer", *([] if ranks is None else ["--"]), *arguments]
    environment = {**os.environ, "CKPT_LINGER_S": "2"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(job: subprocess.Popen[str], losses: Path, step: int) -> None:
    deadline = time.monotonic() + LONG_S
    while not losses.exists() or step not in read_losses(losses):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("ranks", [None, 2])
def test_sigterm_saves_and_stops(ranks: int | None, tmp_path: Path) -> None:
    """All ranks save the same step and the job ends with a sentence; started again, it does the steps that are left."""
    run, losses = tmp_path / "run", tmp_path / "losses"
    arguments = [*TINY, "--every=1000", "--steps=400", "--keep=1", f"--run={run}"]
    job = start(*arguments, f"--loss-log={losses}", ranks=ranks)
    wait_for_step(job, losses, 3)
    job.send_signal(signal.SIGTERM)
    printed, errors = job.communicate(timeout=LONG_S)
    last = max(read_losses(losses))
    assert 3 <= last < 400
    assert ckpt.steps(run) == [last]
    assert f"stopped by SIGTERM after saving step {last}" in errors
    assert f"step {last:>6}/400" in printed
    assert job.returncode == (75 if ranks is None else 1)  # torchrun says 1 whatever its workers say
    if ranks is None:  # enough to start one again
        assert "Traceback" not in errors
        again = start(*arguments, f"--steps={last + 2}", f"--loss-log={losses}", ranks=ranks)
        _, errors = again.communicate(timeout=LONG_S)
        assert again.returncode == 0, errors
        assert sorted(read_losses(losses)) == list(range(1, last + 3))


def test_bad_runs_are_refused_in_one_sentence(tmp_path: Path) -> None:
    """A folder that is no run: what, where, what to do, exit code 2, no traceback, nothing touched."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"miaow")
    job = start(*TINY, f"--run={tmp_path / 'photos'}")
    _, errors = job.communicate(timeout=LONG_S)
    assert job.returncode == 2, errors
    (sentence,) = (line for line in errors.splitlines() if line.startswith("trainer: "))
    assert str(tmp_path / "photos") in sentence
    assert "Traceback" not in errors
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


@pytest.mark.timeout(LONG_S * 3)
def test_the_demonstration(tmp_path: Path) -> None:
    """A killed rank, a restarted job, equal logs and states, a verified run, a picture; and it says so."""
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "trainer.demo", f"--out={out}", "--steps=9", "--every=3", "--kill-at=5"]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = demo.communicate(timeout=LONG_S * 2)
    finally:
        demo.terminate()  # it ends its jobs before itself
        demo.wait()
    assert demo.returncode == 0, printed + "".join(path.read_text() for path in out.glob("*/job.log"))
    told = " ".join(printed.split())
    assert "All 9 losses are the same, bit for bit" in told
    assert "went on from step 3, did 2 steps again" in told
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
