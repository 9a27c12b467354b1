"""Two ranks load together what is damaged: both come to the same end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ckpt
from tests.damage.battery import Battery
from tests.damage.kinds import Kind, holds, inflict, load_reads, target
from tests.ranks import run_ranks


def load_damaged(rank: int, _world: int, folder: str, kind: Kind, share: int) -> list[Any]:
    """What came of each damage, on this rank: by number and without tiers, the latest, and with a tier."""
    os.environ["XDG_RUNTIME_DIR"] = folder  # where no keeper is
    os.fsync = lambda _file: None  # type: ignore[assignment]
    work = Path(folder) / "runs"
    if rank == 0:
        work.mkdir()
        battery = Battery(work, kind)
    dist.barrier()
    if rank != 0:
        battery = Battery(work, kind, make=False)
    told = []
    for number, damage in enumerate(battery.damages):
        if number % share:
            continue
        root = battery.copy(make=rank == 0)
        if rank == 0:
            inflict(root, damage)
        dist.barrier()
        for step, tiers in ((2, ()), ("latest", ()), (2, (battery.pristine,))):
            state = target()
            try:
                report = ckpt.load(root, state, step=step, tiers=tiers)
            except ckpt.CkptError as error:
                ended = "refused", holds(state) == 0 or "must not be used" in str(error)
            else:
                ended = "loaded", report.step, holds(state) == report.step, report.repaired
            told.append((damage.what, damage.key, step, bool(tiers), load_reads(damage), ended))
        dist.barrier()
    return told


@pytest.mark.parametrize("kind", [Kind(2, "raw", True), Kind(2, "zstd", False)], ids=str)
def test_both_ranks_end_alike(tmp_path: Path, record_property: Any, kind: Kind) -> None:
    """Refused by both, or loaded by both: the same step, bit for bit, with the same repairs told."""
    tmp_path.chmod(0o700)
    share = 1 if os.environ.get("CKPT_DAMAGE") == "all" else 5
    first, second = run_ranks(2, load_damaged, str(tmp_path), kind, share)
    assert len(first) == len(second) > 0
    for mine, theirs in zip(first, second, strict=True):
        _, key, step, tiered, met, ended = mine
        assert mine[:5] == theirs[:5]
        assert ended[0] == theirs[5][0], (mine, theirs)
        if ended[0] == "refused":
            assert ended[1], mine
            assert theirs[5][1], theirs
            assert met, mine
            assert key.startswith("writers/") or (step == 2 and not tiered), mine
        else:
            assert ended == theirs[5], (mine, theirs)
            assert ended[2], mine
            assert ended[1] == 2 or step == "latest", mine
            if tiered and met and not key.startswith("writers/"):
                assert ended[3], mine
    record_property("told", f"{len(first)} loads of damaged steps by two ranks ended alike ({kind})")
