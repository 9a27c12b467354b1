"""Storage that fails while it is read, listed or deleted from: one sentence, nothing lost, and it can be repeated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.store import TEST_STORE_ENV
from ckpt.testing import store_env
from tests.ranks import run_ranks

STEPS = [1, 2, 3]
DATA, PART, COMMIT = "step-00000003-w1.3/state-*", "step-00000003-w1.3/part-*", "step-00000003-w1.3/COMMIT"


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((100_000,), float(value))}, "step": value}


def make(_rank: int, _world: int, run: str) -> None:
    for step in STEPS:
        ckpt.save(run, step, state(step), wait=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of three steps."""
    run = str(tmp_path_factory.mktemp("reading") / "run")
    run_ranks(1, make, run, process_group=False)
    return run


@pytest.fixture
def run(made: str, tmp_path: Path) -> str:
    """A copy of it, of hard links, at a new path: deleting from it deletes nothing elsewhere, and so is its session."""
    copy = tmp_path / "run"
    for above, _, names in os.walk(made):
        below = copy / os.path.relpath(above, made)
        below.mkdir(parents=True)
        for name in names:
            os.link(os.path.join(above, name), below / name)
    return str(copy)


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> Iterator[None]:
    """This process's stores fail while the block runs."""
    for name, value in store_env({"wrap": "faulty", **spec}).items():
        monkeypatch.setenv(name, value)
    yield
    monkeypatch.delenv(TEST_STORE_ENV)


READS = [
    pytest.param("EACCES", DATA, ckpt.StoreError, "permission denied", id="EACCES of data"),
    pytest.param("EACCES", PART, ckpt.StoreError, "permission denied", id="EACCES of a part"),
    pytest.param("EACCES", COMMIT, ckpt.StoreError, "permission denied", id="EACCES of COMMIT"),
    pytest.param("ESTALE", DATA, ckpt.StoreError, "went stale", id="ESTALE of data"),
    pytest.param("EIO", DATA, ckpt.DamagedError, "I/O error", id="EIO of data"),
    pytest.param("EIO", PART, ckpt.DamagedError, "I/O error", id="EIO of a part"),
]


@pytest.mark.parametrize(("code", "match", "kind", "says"), READS)
def test_a_file_that_cannot_be_read(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    code: str, match: str, kind: type[ckpt.CkptError], says: str,
) -> None:  # fmt: skip
    """``load`` of the step and ``ckpt verify`` name it; the state is untouched, and it loads when they can be read."""
    named = re.escape(f"{run}/") + match.replace("*", r"\S*")
    target = state(0)
    with faulty(monkeypatch, operation=["get", "read_into", "size"], match=match, errno=code):
        with pytest.raises(kind, match=rf"{named}.*{says}"):
            ckpt.load(run, target, step=3)
        code_of_verify = main(["verify", run, "--step", "3"])
    told = capsys.readouterr()
    # verify lists whatever cannot be checked, of all files; without COMMIT it cannot even begin.
    assert code_of_verify == (8 if match == COMMIT else 4)
    assert re.search(rf"step-00000003-w1\.3/{match.rpartition('/')[2].replace('*', '')}.*{says}", told.out + told.err)
    assert "Traceback" not in told.err
    assert bool((target["model"]["w"] == 0).all()), "the state was not touched"
    other = Path(f"{run}-by-another-path")  # a session keeps the store that it has
    other.symlink_to(run)
    ckpt.load(other, target, step=3)
    assert bool((target["model"]["w"] == 3).all())
    assert ckpt.verify(run).ok


@pytest.mark.parametrize("operation", ["list", "get"])
@pytest.mark.parametrize("verb", [["ls"], ["show"], ["prune", "--keep-last", "1"], ["rollback", "--to", "1"]])
def test_a_verb_on_storage_that_fails(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: list[str], operation: str
) -> None:
    """One sentence with the path, exit code 8, and everything is as it was; repeated later the verb does its work."""
    words = [verb[0], run, *verb[1:]]
    before = sorted(str(path) for path in Path(run).rglob("*"))
    with faulty(monkeypatch, operation=operation, errno="ESTALE"):
        assert main(words) == ckpt.StoreError.exit_code
    told = capsys.readouterr()
    assert re.fullmatch(
        rf"ckpt: {re.escape(run)}\S*: cannot (list|read): the network mount went stale; [^\n]*\n", told.err
    )
    assert sorted(str(path) for path in Path(run).rglob("*")) == before
    assert main(words) == 0
    assert all(report.ok for report in [ckpt.verify(run)])


def test_a_rollback_that_cannot_be_written(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latest stays the latest."""
    with faulty(monkeypatch, operation="create", errno="ENOSPC", after_nbytes=0):
        assert main(["rollback", run, "--to", "1"]) == 8
    assert re.fullmatch(
        r"ckpt: \S+/writers/000002\.json: cannot write: no space left [^\n]*\n", capsys.readouterr().err
    )
    assert ckpt.latest(run) == 3
    assert main(["rollback", run, "--to", "1"]) == 0
    assert ckpt.latest(run) == 1


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_prune_that_fails_half_way(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nth: int
) -> None:
    """Whichever deletion fails: what is left are whole steps or no steps, and pruning again ends with the same."""
    with faulty(monkeypatch, operation=["delete", "delete_folder"], errno="EIO", on_nth=nth):
        assert main(["prune", run, "--keep-last", "1"]) == 8
    assert re.fullmatch(r"ckpt: \S+: cannot delete: the device reports an I/O error; [^\n]*\n", capsys.readouterr().err)
    assert ckpt.latest(run) == 3
    for step in ckpt.steps(run):
        assert ckpt.verify(run, step=step).ok
    assert main(["prune", run, "--keep-last", "1", "--abandoned", "--grace", "0"]) == 0
    assert ckpt.steps(run) == [3]
    assert main(["prune", run, "--keep-last", "1"]) == 0
    assert ckpt.verify(run).ok


@pytest.mark.parametrize("match", [DATA, PART])
def test_a_read_that_fails_once_costs_no_step(run: str, monkeypatch: pytest.MonkeyPatch, match: str) -> None:
    """Going back a step for a hiccup would lose work: it is read again, and that is told."""
    target = state(0)
    with faulty(monkeypatch, match=match, operation=["get", "read_into"], errno="EIO", on_nth=1):
        report = ckpt.load(run, target)
    assert (report.step, report.skipped) == (3, ())
    assert torch.equal(target["model"]["w"], torch.full((100_000,), 3.0))
    assert [line for line in report.repaired if "another try" in line]
