"""Whatever storage does to a save: a clear error in time, nothing half done that counts, and the next save works."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.run import Run
from ckpt.testing import store_env
from tests.engine.storage_faults import KEEPER, Fault, Sleeping, faults, is_of, seconds_of, state_of
from tests.keeper.conftest import wait_for
from tests.ranks import run_ranks

LIMIT_S = 10.0
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


def save(run: str, step: int, state: dict[str, Any], progress_timeout_s: float = 30.0) -> None:
    ckpt.save(run, step, state, progress_timeout_s=progress_timeout_s).result(LIMIT_S)


# -- faults made by wrappers, one rank -----------------------------------------------------


def meet_all(_rank: int, _world: int, run: str, known: list[Fault], sleeping: Sleeping) -> list[str]:
    """Meet each fault at the next step, then make that step; what did not hold."""
    wrong = []
    step = 1
    ckpt.save(run, step, state_of(step), wait=True)
    for fault in known:
        with sleeping.awake(fault):
            failed, took_s = seconds_of(save, run, step + 1, state_of(-1))
        left = len(list(Path(run).glob("step-*"))) - 1
        latest = ckpt.latest(run)
        step += 1
        again, _ = seconds_of(save, run, step, state_of(step))
        after = len(list(Path(run).glob("step-*")))
        holds = {
            f"a StoreError: {failed!r}": type(failed) is ckpt.StoreError,
            f"its cause: {failed}": re.search(fault.says, str(failed)),
            f"the step and the path: {failed}": re.search(rf"save of step {step} .*{re.escape(run)}", str(failed)),
            f"what to do: {failed}": "; " in str(failed),
            f"in time: {took_s:.1f} s": took_s < LIMIT_S,
            f"the step before: {latest}": latest == step - 1,
            f"no debris but what cannot go: {left}": left == int(fault.debris),
            f"the same step again: {again!r}": again is None and ckpt.latest(run) == step,
            f"no debris after the next save: {after}": after == 2,
            "both steps are whole": all(is_of(run, kept) for kept in (step - 1, step)),
        }
        wrong += [f"{fault.name}: {what}" for what, held in holds.items() if not held]
        opened = Run.open(run)
        opened.delete_attempt(opened.find(step - 1).attempt)  # they are large
    return wrong


@pytest.mark.parametrize("part", [0, 1])
def test_every_fault_of_a_save(tmp_path: Path, part: int) -> None:
    """Each ends in time with cause, path and advice; what is left does not count; the same step can be saved again."""
    known = faults()[part::2]
    sleeping = Sleeping(tmp_path, known)
    (wrong,) = run_ranks(1, meet_all, str(tmp_path / "run"), known, sleeping, env=sleeping.env, process_group=False)
    assert not wrong, "\n".join(wrong)


def save_slowly(_rank: int, _world: int, run: str) -> tuple[bool, float]:
    """A save that takes longer than its time-out for standing still."""
    started = time.monotonic()
    ckpt.save(run, 1, state_of(1), progress_timeout_s=1.5, wait=True)
    return is_of(run, 1), time.monotonic() - started


@pytest.mark.parametrize(
    "spec",
    [
        {"wrap": "slow", "operation": "write", "bytes_per_s": 10e6},  # a block in 0.8 s, all of it in 2 s
        {"wrap": "slow", "operation": ["open_sink", "create", "list", "close"], "delay_s": 0.5},
    ],
    ids=["throttled", "slow to answer"],
)
def test_slow_is_not_hung(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Storage that is slow but moves fails no save, however long it takes: the time-out is for standing still."""
    ((whole, took_s),) = run_ranks(
        1, save_slowly, str(tmp_path / "run"), env=store_env({"program": KEEPER, **spec}), process_group=False
    )
    assert whole
    assert took_s > 1.5


def save_once(_rank: int, _world: int, run: str, encode: str) -> bool:
    ckpt.save(run, 1, state_of(1), encode=encode, wait=True)
    return is_of(run, 1)


@pytest.mark.parametrize("most_nbytes", [1 << 20, 4097])
def test_short_writes_are_gone_on_with(tmp_path: Path, most_nbytes: int) -> None:
    """A system that takes a part of what it is given, whole pages or not: what is missing is written next."""
    env = store_env({"wrap": "short", "program": KEEPER, "most_nbytes": most_nbytes})
    for encode in ("raw", "zstd"):
        assert run_ranks(1, save_once, str(tmp_path / encode), encode, env=env, process_group=False) == [True]


# -- two ranks -----------------------------------------------------------------------------

OF_RANK_1 = "*-00001-of-00002.*"


def rank_1_faults() -> list[Fault]:
    """Of rank 1's files only; the last two hang."""
    hang = {"wrap": "blocking", "on_nth": 1}
    return [
        Fault("full", "rank 1: StoreError: .*no space left", operation="write", match=OF_RANK_1, errno="ENOSPC"),
        Fault("its part", "rank 1: StoreError: .*I/O error", operation="create", match="part-00001-*", errno="EIO"),
        Fault("it hangs", "no part from rank 1 of 2 .*`write` of .*has not returned", operation="write",
              match=OF_RANK_1, **hang),
        Fault("its part hangs", "no part from rank 1 of 2 .*`create` of .*has not returned", operation="create",
              match="part-00001-*", **hang),
    ]  # fmt: skip


def meet_on_rank_1(rank: int, world: int, run: str, known: list[Fault], sleeping: Sleeping) -> list[str]:
    """The same with two ranks, of which only rank 1's files fail. Every rank owns one of two equal tensors."""
    import torch.distributed as dist

    def state(value: int) -> dict[str, Any]:
        return {"mine": ckpt.per_rank(rank), "w": state_of(value)["w"], "v": state_of(value)["w"]}

    wrong = []
    step = 1
    ckpt.save(run, step, state(step), wait=True)
    for fault in known:
        hangs = "hang" in fault.name
        with contextlib.ExitStack() as awake:
            if rank == 0:
                awake.enter_context(sleeping.awake(fault))
            dist.barrier()
            failed, took_s = seconds_of(save, run, step + 1, state(-1), 1.0)
            dist.barrier()
            if not hangs:
                awake.close()
                dist.barrier()
            step += 1  # what hangs does so still, and only it
            again, _ = seconds_of(save, run, step, state(step))
            dist.barrier()
        kind = ckpt.SaveFailedError if hangs else (ckpt.StoreError if rank else ckpt.RankError)
        says = fault.says if rank == 0 else fault.says.removeprefix("rank 1: StoreError: ")
        holds = {
            f"a {kind.__name__}: {failed!r}": type(failed) is kind,
            f"its cause: {failed}": re.search(says, str(failed)),
            f"the cause's exit code: {failed!r}": getattr(failed, "exit_code", 0) in {7, 8},
            f"in time: {took_s:.1f} s": took_s < LIMIT_S,
            f"the same step again: {again!r}": again is None and ckpt.latest(run) == step,
        }
        wrong += [f"rank {rank}: {fault.name}: {what}" for what, held in holds.items() if not held]
    dist.barrier()
    wrong += [f"step {kept} is damaged" for kept in ckpt.steps(run) if not ckpt.verify(run, step=kept).ok]
    return wrong


def test_every_fault_of_one_of_two_ranks(tmp_path: Path) -> None:
    """Rank 0 is told, in time, that it is rank 1 and why; hung writes are left behind and harm no later save."""
    known = rank_1_faults()
    sleeping = Sleeping(tmp_path, known)
    run = str(tmp_path / "run")
    for wrong in run_ranks(2, meet_on_rank_1, run, known, sleeping, env=sleeping.env):
        assert not wrong, "\n".join(wrong)
    wait_for(lambda: len(list(Path(run).glob("step-*"))) == 1 + len(known), "hung writes remove what they wrote")
    assert ckpt.steps(run) == list(range(1, 2 + len(known)))


# -- faults made by the kernel -------------------------------------------------------------


def meet_for_real(_rank: int, _world: int, run: str, says: str, break_it: Any, mend_it: Any) -> None:
    """Save 1; with something broken save 2 fails; mended, it does not."""
    ckpt.save(run, 1, state_of(1, 1 << 20), wait=True)
    break_it()
    failed, took_s = seconds_of(save, run, 2, state_of(2, 1 << 20))
    assert took_s < LIMIT_S
    assert type(failed) is ckpt.StoreError, failed
    assert re.search(says, str(failed)), failed
    assert run in str(failed)
    assert ckpt.steps(run) == [1]
    assert is_of(run, 1)
    mend_it()
    ckpt.save(run, 2, state_of(2, 1 << 20), wait=True)
    assert ckpt.steps(run) == [1, 2]
    assert is_of(run, 2)


def keeper_limit(nbytes: int) -> None:
    """No process may write files larger than that: the keeper of this rank."""
    resource.prlimit(keeper_client(0).keeper_pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


class LimitFiles:
    """``ulimit -f`` for the keeper; SIGXFSZ is ignored by every Python."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __call__(self) -> None:
        keeper_limit(self._nbytes)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """RLIMIT_FSIZE of 64 KiB, of a state of 1 MiB."""
    says = r"the file may not grow further after [\d,]+ bytes .*; raise `ulimit -f`"
    arguments = (says, LimitFiles(64 << 10), LimitFiles(resource.RLIM_INFINITY))
    run_ranks(1, meet_for_real, str(tmp_path / "run"), *arguments, process_group=False)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "mount"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


class Fill:
    """A file that takes all the room but a little; removed again with ``free``."""

    def __init__(self, place: Path, *, free: bool = False) -> None:
        self._file, self._free = place / "other-peoples-data", free

    def __call__(self) -> None:
        if self._free:
            self._file.unlink()
            return
        found = os.statvfs(self._file.parent)
        self._file.write_bytes(bytes(found.f_bavail * found.f_bsize - (300 << 10)))


def test_a_device_that_is_full(mount: Path) -> None:
    """A real file system fills up in the middle of a file."""
    says = r"no space left on the device after [\d,]+ bytes .*; free space"
    run_ranks(1, meet_for_real, str(mount / "run"), says, Fill(mount), Fill(mount, free=True), process_group=False)


class Remount:
    """The same file system, for reading or for writing."""

    def __init__(self, place: Path, how: str) -> None:
        self._command = ["mount", "-o", f"remount,{how}", str(place)]

    def __call__(self) -> None:
        subprocess.run(self._command, check=True)


def test_a_device_that_becomes_read_only(mount: Path) -> None:
    """As file systems do after an error of their device."""
    says = "the file system is read-only; remount it for writing"
    run_ranks(
        1, meet_for_real, str(mount / "run"), says, Remount(mount, "ro"), Remount(mount, "rw"), process_group=False
    )


class Mode:
    """Of the run's folder, and of what is in it."""

    def __init__(self, run: str, mode: int) -> None:
        self._run, self._mode = run, mode

    def __call__(self) -> None:
        os.chmod(self._run, self._mode)


def without_privilege(rank: int, world: int, *arguments: Any) -> None:
    """Root's keeper gets no capability to write where modes forbid it: it is out of reach of all that is executed."""
    if os.geteuid() == 0:
        assert ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0
    meet_for_real(rank, world, *arguments)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    """The run's folder may not be written to any more."""
    run = str(tmp_path / "run")
    says = "permission denied; check owner and mode"
    run_ranks(1, without_privilege, run, says, Mode(run, 0o500), Mode(run, 0o700), process_group=False)
