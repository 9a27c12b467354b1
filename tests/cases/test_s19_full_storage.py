"""S19: storage is full, or a quota used up, at any byte of a save."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.job import keeper_client
from tests.engine.storage_faults import Fault, Sleeping, seconds_of
from tests.ranks import run_ranks

NBYTES = 1 << 20
SAYS = {"ENOSPC": "no space left on the device", "EDQUOT": "the disk quota is used up"}
PLACES: dict[str, dict[str, Any]] = {
    "before the first byte": {"after_nbytes": 0},
    "after one byte": {"after_nbytes": 1},
    "in the middle of a shard": {"after_nbytes": NBYTES // 2},
    "in the part": {"operation": "create", "match": "part-*", "after_nbytes": 100},
    "in COMMIT": {"operation": "create", "match": "COMMIT", "after_nbytes": 100},
    "at close": {"operation": "close", "match": "step-*", "after_nbytes": 0},
}
FAULTS = [
    Fault(
        f"{code} {where}", says, errno=code, **{"operation": ["write", "create", "close"], "match": "step-*", **place}
    )
    for code, says in SAYS.items()
    for where, place in PLACES.items()
]


def state(value: int) -> dict[str, Any]:
    """1 MiB, every element of which tells its step."""
    return {"w": torch.full((NBYTES // 4,), float(value)), "step": value}


def save(run: str, step: int, what: dict[str, Any]) -> None:
    ckpt.save(run, step, what).result(10)


def fill_up(_rank: int, _world: int, run: str, sleeping: Sleeping) -> list[str]:
    """Meet each at the next step, which is then saved; what did not hold."""
    wrong = []
    ckpt.save(run, 0, state(0), wait=True)
    for step, fault in enumerate(FAULTS, 1):
        with sleeping.awake(fault):
            error, _ = seconds_of(save, run, step, state(-1))
        holds = {
            "type": type(error) is ckpt.StoreError,
            "cause and path": re.search(f"{re.escape(run)}/step-{step:08}-.*{fault.says}", str(error)),
            "bytes": re.search(rf"{fault.says} after [\d,]+ byte", str(error)),
            "advice": "free space" in str(error),
            "previous step": ckpt.latest(run) == step - 1 and ckpt.verify(run).ok,
            "no leftovers": len(list(Path(run).glob("step-*"))) == step,
        }
        ckpt.save(run, step, state(step), wait=True)
        holds["retry"] = ckpt.latest(run) == step
        wrong += [f"{fault.name}: {what}: {error}" for what, held in holds.items() if not held]
    return wrong


def test_s19_full_at_every_place(tmp_path: Path) -> None:
    """No space and no quota, from the first byte to the last: path, bytes, advice told; the same step saved after."""
    sleeping, run = Sleeping(tmp_path, FAULTS), str(tmp_path / "run")
    (wrong,) = run_ranks(1, fill_up, run, sleeping, env=sleeping.env, process_group=False)
    assert not wrong, "\n".join(wrong)
    assert ckpt.steps(run) == list(range(len(FAULTS) + 1))
    for step in ckpt.steps(run):
        assert bool((ckpt.read(run, step=step)["w"] == step).all())


def limit(_rank: int, _world: int, run: str) -> str:
    """64 KiB for any file of the keeper, whose SIGXFSZ is ignored as in every Python."""
    ckpt.save(run, 1, state(1), wait=True)
    pid = keeper_client(0).keeper_pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    error, _ = seconds_of(save, run, 2, state(2))
    assert type(error) is ckpt.StoreError
    assert ckpt.steps(run) == [1]
    assert len(list(Path(run).glob("step-*"))) == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ckpt.save(run, 2, state(2), wait=True)
    return str(error)


def test_s19_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """``ulimit -f`` of 64 KiB with a state of 1 MiB: no signal ends anything, the file and the limit are named."""
    run = str(tmp_path / "run")
    (said,) = run_ranks(1, limit, run, process_group=False)
    assert re.search(r"\.safetensors: cannot write: the file may not grow further after [\d,]+ bytes.*ulimit -f", said)
    assert ckpt.steps(run) == [1, 2]


ONLY_RANK_1 = Fault(
    "rank 1 is full", "no space left", match="*-00001-of-00002.*", operation="write", errno="ENOSPC", after_nbytes=0
)


def one_is_full(rank: int, world: int, run: str, sleeping: Sleeping) -> tuple[str, str, float]:
    """Rank 1 only; both are told, and both save again."""
    import torch.distributed as dist

    shares = {"w": state(1)["w"], "v": state(1)["w"]}  # one for each rank to write
    ckpt.save(run, 1, shares, wait=True)
    awake = sleeping.awake(ONLY_RANK_1)
    if rank == 0:
        awake.__enter__()
    dist.barrier()
    error, took_s = seconds_of(save, run, 2, shares)
    dist.barrier()
    if rank == 0:
        awake.__exit__(None, None, None)
    dist.barrier()
    assert ckpt.steps(run) == [1]
    ckpt.save(run, 2, shares, wait=True)
    return type(error).__name__, str(error), took_s


@pytest.mark.parametrize("world", [2])
def test_s19_only_one_rank_is_full(tmp_path: Path, world: int) -> None:
    """Rank 0 raises within 10 s, naming rank 1 and the cause; all ranks raise; the same step is saved after."""
    sleeping, run = Sleeping(tmp_path, [ONLY_RANK_1]), str(tmp_path / "run")
    first, second = run_ranks(world, one_is_full, run, sleeping, env=sleeping.env)
    assert first[0] == "RankError"
    assert re.search("rank 1: StoreError: .*no space left on the device after 0 bytes", first[1])
    assert first[2] < 10
    assert second[0] == "StoreError"
    assert ckpt.steps(run) == [1, 2]
    assert all(ckpt.verify(run, step=step).ok for step in (1, 2))
    assert len(list(Path(run).glob("step-*"))) == 2
