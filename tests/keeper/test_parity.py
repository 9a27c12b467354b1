"""Parity files: what keepers write for their ranks, and what becomes of a save whose parity cannot be written."""

from __future__ import annotations

import functools
import operator
import os
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.format.parity import decode_parity
from ckpt.run import Run
from ckpt.testing import store_env
from tests.ranks import run_ranks

ELEMENTS = (5 << 20) // 4 + 3  # 5 MiB and an odd bit; of rank r: r more


def own_state(rank: int) -> dict[str, object]:
    """Each rank has files of its own, of lengths of their own."""
    torch.manual_seed(rank)
    return {"own": ckpt.per_rank(torch.randn(ELEMENTS + 1000 * rank)), "all": torch.arange(5000.0)}


def save(rank: int, _world: int, run: str, encode: str, ranks_of_a_node: int) -> str:
    """One save with parity; the error, if there was one."""
    os.environ["CKPT_JOB"] += f"-node{rank // ranks_of_a_node}"
    try:
        ckpt.save(run, 1, own_state(rank), wait=True, parity=1, encode=encode)
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def xor(files: list[bytes]) -> bytes:
    """The slow and plain way."""
    whole = functools.reduce(operator.xor, (int.from_bytes(file, "little") for file in files))
    return whole.to_bytes(max(map(len, files)), "little")


@pytest.mark.parametrize("encode", ["raw", "zstd"])
@pytest.mark.parametrize("ranks_of_a_node", [1, 2, 4])
def test_every_node_has_one(tmp_path: Path, ranks_of_a_node: int, encode: str) -> None:
    """The XOR of exactly its ranks' files, pinned by COMMIT through its record."""
    run = Run.open(tmp_path / "run")
    assert run_ranks(4, save, run.url, encode, ranks_of_a_node) == [""] * 4
    found = run.find(1)
    assert found.commit is not None
    folder = tmp_path / "run" / found.attempt.folder
    pinned = {ref.name: ref for ref in found.commit.files if ref.name.startswith("parity-")}
    assert sorted(pinned) == [f"parity-{rank:05d}-of-00004.json" for rank in range(0, 4, ranks_of_a_node)]
    members = []
    for name, ref in pinned.items():
        raw = run.pinned_file(found.attempt, name, ref.nbytes, ref.digest)
        parity = decode_parity(raw, name)
        files = [(folder / member.name).read_bytes() for member in parity.members]
        assert [len(file) for file in files] == [member.nbytes for member in parity.members]
        assert (folder / parity.name).read_bytes() == xor(files)
        first = int(name[7:12])
        assert {member.rank for member in parity.members} == set(range(first, first + ranks_of_a_node))
        members += [member.name for member in parity.members]
    suffixes = {".safetensors", ".pack"}
    assert sorted(members) == sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    assert ckpt.verify(run.url).ok


@pytest.mark.parametrize("match", ["parity-*.xor", "parity-*.json"])
def test_a_save_without_its_parity_is_none(tmp_path: Path, match: str) -> None:
    """All ranks hear why, nothing is left behind, and the next save works."""
    run = str(tmp_path / "run")
    full = store_env({"wrap": "faulty", "program": "keeper", "match": match, "errno": "ENOSPC"})
    told = run_ranks(2, save, run, "raw", 2, env=full)
    assert all("no space left on the device" in error for error in told)
    assert sorted(error.partition(":")[0] for error in told) == ["RankError", "StoreError"]
    assert list((tmp_path / "run").glob("step-*")) == []
    assert run_ranks(2, save, run, "raw", 2) == ["", ""]
    assert ckpt.steps(run) == [1]


def ask_for_different(rank: int, _world: int, run: str) -> str:
    """Only rank 1 wants parity."""
    with pytest.raises(ckpt.CkptError) as raised:
        ckpt.save(run, 1, own_state(rank), wait=True, parity=rank)
    return str(raised.value)


def test_ranks_must_want_the_same(tmp_path: Path) -> None:
    """Refused by all, before anything is written."""
    told = run_ranks(2, ask_for_different, str(tmp_path / "run"))
    assert all("the ranks ask for different parity: [0, 1]" in text for text in told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parity", [2, -1, True, 0.5])
def test_other_parity_is_refused(tmp_path: Path, parity: object) -> None:
    """One file per node is what there is."""
    with pytest.raises(ckpt.BadInputError, match="expected 0, or 1 for one parity file per node"):
        ckpt.save(tmp_path / "run", 1, {"x": 1}, parity=parity)  # type: ignore[arg-type]
