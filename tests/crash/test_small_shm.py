"""A container's `/dev/shm` of 64 MiB, which is what most of them have: arenas are memfds and do not count."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from tests.keeper.conftest import ROOT

MIB = 1 << 20

IN_A_NAMESPACE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]

SAVE = """
import os, sys, torch, ckpt
shm = os.statvfs("/dev/shm")
assert shm.f_blocks * shm.f_frsize == 64 << 20, "this is not the small one"
state = {"w": torch.full((256 << 18,), 7.0)}
for step in 1, 2, 3:  # both arenas, and one of them again
    ckpt.save(sys.argv[1], step, state, wait=True)
state["w"].zero_()
assert ckpt.load(sys.argv[1], state).step == 3
assert bool((state["w"] == 7.0).all())
assert os.statvfs("/dev/shm").f_bfree == shm.f_bfree, "something of it was used"
"""


def why_not() -> str:
    """Why no small `/dev/shm` can be had here; "" if it can."""
    if shutil.which("unshare") is None:
        return "no unshare command"
    done = subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


@pytest.mark.skipif(bool(why_not()), reason=f"a mount namespace of our own is not to be had: {why_not()}")
def test_a_save_of_four_times_dev_shm(tmp_path: Path):
    """256 MiB are saved three times and read back, and `/dev/shm` is as empty as it was."""
    run = tmp_path / "run"
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "CKPT_JOB": "small"}
    subprocess.run([*IN_A_NAMESPACE, sys.executable, "-c", SAVE, str(run)], cwd=ROOT, env=environment, check=True)
    assert ckpt.steps(run) == [1, 2, 3]
    assert sum(path.stat().st_size for path in run.glob("step-*/*.safetensors")) >= 3 * 256 * MIB
    shutil.rmtree(run)
