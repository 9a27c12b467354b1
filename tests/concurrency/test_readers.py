"""A reader during retention, at every moment of either: it reads one step to its end, or is told; never a mixture."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.diff import diff
from ckpt.engine.export import restore
from ckpt.engine.load import read_step
from ckpt.engine.retention import prune
from ckpt.errors import DamagedError, NotFoundError
from ckpt.reading.verify import verify
from ckpt.run import Run
from ckpt.store import LocalStore
from ckpt.testing import FaultyStore
from tests.concurrency.interleave import NBYTES, MeetingStore, content, damage, folders, meeting, retain, save

Deleter = Callable[[Run], object]
DELETERS: dict[str, Deleter] = {"retention": retain, "prune": lambda run: prune(run, keep_last=1)}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Steps 1 to 3, to be copied."""
    save(tmp_path / "original", 1, 2, 3)
    return tmp_path / "original"


def whole(tree: dict[str, Any]) -> int:
    """The step that a tree is of, all of it."""
    step = tree["step"]
    assert isinstance(step, int)
    assert bytes(tree["w"].numpy()) == content(step, 1)
    return step


def whole_step(run: Run, state: object) -> int:
    return whole(read_step(run, state.attempt, state.commit))


@pytest.mark.parametrize("deleter", DELETERS)
def test_a_reader_that_comes_at_every_moment_of_a_deletion(original: Path, tmp_path: Path, deleter: str) -> None:
    """Who got step 1 behind a hold reads all of it when everything else is done; or it is said not to be there."""
    run, operations = meeting(shutil.copytree(original, tmp_path / "counted"))
    DELETERS[deleter](run)
    assert folders(run.url) == ["step-00000003-w1.3"]
    read, refused = 0, 0
    for at in range(len(operations)):
        url = shutil.copytree(original, tmp_path / f"at-{at}")
        with contextlib.ExitStack() as reading:
            got = []

            def come(url: Path = url, reading: contextlib.ExitStack = reading, got: list[object] = got) -> None:
                with contextlib.suppress(NotFoundError):
                    got.append(reading.enter_context(Run.open(url).reading(1)))

            DELETERS[deleter](meeting(url, at, come)[0])
            if got:
                assert whole_step(Run.open(url), got[0]) == 1, operations[at]
                read += 1
            else:
                refused += 1
                with pytest.raises(NotFoundError, match="no live step 1"):
                    ckpt.read(url, step=1)
        assert ckpt.verify(url, 3).ok
        prune(url, keep_last=1, grace_s=0)
        assert folders(url) == ["step-00000003-w1.3"]
        assert not list((url / "holds").iterdir())
        shutil.rmtree(url)
    assert read > 0, operations
    assert refused > 0, operations


READERS: dict[str, Callable[[Run], object]] = {
    "read the newest": lambda run: whole_step_of(run, None),
    "read step 1": lambda run: whole_step_of(run, 1),
    "verify step 1": lambda run: verify(run, 1),
    "restore step 1": lambda run: restore(run, f"{run.url}-out", 1),
    "diff steps 1 and 2": lambda run: diff(run, 1, 2),
}


def whole_step_of(run: Run, step: int | None) -> int:
    with run.reading(step) as found:
        return whole_step(run, found)


@pytest.mark.parametrize("reader", READERS)
def test_a_deletion_at_every_moment_of_a_reader(original: Path, tmp_path: Path, reader: str) -> None:
    """A step that is read behind a hold stays; one that was gone before is said not to be there, no more."""
    run, operations = meeting(shutil.copytree(original, tmp_path / "counted"))
    expected = READERS[reader](run)
    outcomes = {"read": 0, "not there": 0}
    for at in range(len(operations)):
        url = shutil.copytree(original, tmp_path / f"at-{at}")
        run = meeting(url, at, lambda url=url: retain(Run.open(url)))[0]
        try:
            found = READERS[reader](run)
        except NotFoundError as error:
            assert "no live step" in str(error), operations[at]  # noqa: PT017 - either end is right, and counted
            outcomes["not there"] += 1
        else:
            assert type(found) is type(expected)
            assert not (reader.startswith("verify") and found.problems), operations[at]
            assert not isinstance(found, int) or found == expected, operations[at]
            outcomes["read"] += 1
        assert ckpt.verify(url, 3).ok
        assert not list((url / "holds").iterdir())
        shutil.rmtree(url)
        shutil.rmtree(f"{url}-out", ignore_errors=True)
    assert outcomes["read"] > 0
    assert (outcomes["not there"] > 0) == (reader != "read the newest")


@pytest.mark.parametrize("refusal", ["EROFS", "EACCES", "ENOSPC"])
def test_a_reader_without_a_hold_is_told(original: Path, tmp_path: Path, refusal: str) -> None:
    """Where no hold can be written, files may go under a reader: it gets an error or the whole step, no mixture."""

    def reading(url: Path, at: int | None = None) -> tuple[Run, list[str]]:
        store = FaultyStore(LocalStore(url), match="holds/*", operation="create", errno=refusal)
        meet = MeetingStore(store, at, lambda: retain(Run.open(url)))
        return Run(meet), meet.seen

    run, operations = reading(shutil.copytree(original, tmp_path / "counted"))
    assert whole_step_of(run, 1) == 1
    assert not (Path(run.url) / "holds").exists()
    told = 0
    for at in range(len(operations)):
        run, _ = reading(shutil.copytree(original, tmp_path / f"at-{at}"), at)
        try:
            assert whole_step_of(run, 1) == 1
        except (DamagedError, NotFoundError):
            told += 1
    assert told > 0


def test_a_load_falls_back_while_retention_runs(original: Path, tmp_path: Path) -> None:
    """``ckpt.load`` holds what it loads; of a damaged newest step it lets go before it takes the next."""
    url = shutil.copytree(original, tmp_path / "run")
    damage(url, 3)
    state = {"w": torch.zeros(NBYTES, dtype=torch.uint8), "step": 0}
    report = ckpt.load(url, state)
    assert (report.step, whole(state)) == (2, 2)
    assert [skip.step for skip in report.skipped] == [3]
    assert not list((url / "holds").iterdir())


def test_a_held_step_stays_until_its_reader_is_done(original: Path) -> None:
    """Retention and prune leave it, with its COMMIT, and say who holds it."""
    with Run.open(original).reading(1):
        retain(Run.open(original))
        assert folders(original) == ["step-00000001-w1.1", "step-00000003-w1.3"]
        report = prune(original, keep_last=1)
        assert ckpt.steps(original) == [1, 3]
        assert report.removed == ()
    assert prune(original, keep_last=1, dry_run=True).removed[0].step == 1
    retain(Run.open(original))
    assert folders(original) == ["step-00000003-w1.3"]
