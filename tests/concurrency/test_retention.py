"""The keeper's retention: what it reads back before it deletes, what it never deletes, what it sweeps later."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from ckpt.errors import StoreError
from ckpt.format.commit import Attempt
from ckpt.format.metrics import METRICS
from ckpt.keeper import retention
from ckpt.keeper.client import KeeperClient
from ckpt.keeper.retention import Known
from ckpt.plan.retention import Best, KeepPolicy
from ckpt.run import Run
from ckpt.store import LocalStore
from ckpt.testing import FaultyStore, read_log, store_env
from tests.concurrency.interleave import damage, folders, give_metrics, meeting, retain, save
from tests.keeper.conftest import wait_for
from tests.keeper.rank_process import stage
from tests.keeper.steps import committed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of no steps yet."""
    return Run.open(tmp_path / "by-hand")


def live(run: Run) -> list[int]:
    return [state.attempt.step for state in run.survey().live]


# -- what is read back ---------------------------------------------------------------------


@pytest.mark.parametrize(("last", "reads"), [(1, 11), (2, 5), (3, 3)])
def test_each_last_th_save_reads_one_step_back(run: Run, last: int, reads: int) -> None:
    """What has been read back vouches as long as it stays: of 12 saves with keep(last=3), three are read, once each."""
    known, reading, operations = Known(), *meeting(run.url)
    for step in range(1, 13):
        save(run.url, step)
        assert retain(reading, last, known) == []
    assert live(run) == list(range(13 - last, 13))
    read = Counter(word.split("/")[0] for word in operations if "state-00001-" in word and word.startswith("read_into"))
    assert len(read) == reads
    assert len(set(read.values())) == 1


def test_the_newest_is_read_first(run: Run) -> None:
    """When it is whole, no other is read."""
    save(run.url, 1, 2, 3, 4)
    reading, operations = meeting(run.url)
    assert retain(reading, 3) == []
    assert {word.split("/")[0].split(" ")[1] for word in operations if word.startswith("read_into")} == {
        "step-00000004-w1.4"
    }


def test_a_damaged_newest_step_does_not_vouch(run: Run) -> None:
    """The next older that stays does, and the damage is told, once."""
    save(run.url, 1, 2, 3, 4)
    damage(run.url, 4)
    known = Known()
    (warning,) = retain(run, 2, known)
    assert "step 4 (w1.4) does not verify: step-00000004-w1.4/state-00001-of-00002.safetensors: w[" in warning
    assert live(run) == [3, 4]
    assert retain(run, 2, known) == []


def test_nothing_goes_when_none_that_stays_verifies(run: Run) -> None:
    """However many there are of the old ones, and however often retention comes; the next good save lets them go."""
    save(run.url, 1, 2, 3, 4)
    damage(run.url, 3)
    damage(run.url, 4)
    known = Known()
    warnings = retain(run, 2, known)
    assert warnings[-1] == "retention: nothing was deleted: of the steps that would stay (4, 3) none verifies"
    assert "nothing was deleted" in retain(run, 2, known)[-1]
    assert live(run) == [1, 2, 3, 4]
    save(run.url, 5)
    assert retain(run, 2, known) == []
    assert live(run) == [4, 5]


def test_a_good_step_of_long_ago_does_not_vouch(run: Run) -> None:
    """Else a run would go back to it when the newer ones turn out to be damaged."""
    save(run.url, 10, 11, 12, 13)
    damage(run.url, 12)
    damage(run.url, 13)
    known = Known()
    warnings: list[str] = []
    known.whole[Attempt(10, 1, 1)] = True
    known.retain(run, run.find().attempt, KeepPolicy(last=2, every=10), warnings)
    assert live(run) == [10, 11, 12, 13]
    assert "nothing was deleted" in warnings[-1]


def test_a_superseded_attempt_waits_for_the_one_that_stands_for_it(run: Run) -> None:
    """When the same step was saved again, and that is damaged, the older attempt is not deleted."""
    save(run.url, 7, 7)
    second = Path(run.url, "step-00000007-w1.2")
    file = next(second.glob("state-00001-*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "nothing was deleted" in retain(run)[-1]
    assert folders(run.url) == ["step-00000007-w1.1", "step-00000007-w1.2"]
    file.write_bytes(whole)
    assert retain(run) == []
    assert folders(run.url) == ["step-00000007-w1.2"]


@pytest.mark.parametrize("operation", ["get", "list", "size"])
def test_a_store_that_cannot_be_read_loses_nothing(run: Run, operation: str) -> None:
    """Whatever cannot be told is no reason to delete: wherever it fails, step 2 was read back, or step 1 is there."""
    save(run.url, 1, 2)
    store, operations = LocalStore(run.url), operations_of(run)
    stayed = 0
    for nth in range(1, sum(word.split(" ")[0] == operation for word in operations) + 1):
        warnings: list[str] = []
        with contextlib.suppress(StoreError):
            warnings = retain(Run(FaultyStore(store, operation=operation, errno="ESTALE", on_nth=nth)))
        if live(run) == [1, 2]:
            stayed += 1
            continue
        assert live(run) == [2]
        assert not any("does not verify" in warning for warning in warnings)
        shutil.rmtree(run.url)
        save(run.url, 1, 2)
    assert stayed > 0


# -- best ----------------------------------------------------------------------------------


def test_the_best_steps_stay(run: Run) -> None:
    """By what was saved with them; NaN, nothing, and what is damaged count for nothing."""
    save(run.url, 1, 2, 3, 4, 5, 6)
    for step, loss in ((1, 0.5), (2, 0.1), (3, math.nan), (4, 0.1), (5, 0.0)):
        give_metrics(run, step, loss=loss)
    (Path(run.url) / "step-00000005-w1.5" / METRICS).write_bytes(b"{}")
    warnings: list[str] = []
    policy = KeepPolicy(last=1, best=Best("loss", 2))
    Known().retain(run, run.find().attempt, policy, warnings)
    assert live(run) == [2, 4, 6]
    (warning,) = warnings
    assert "the metrics of step 5 count for nothing" in warning


# -- what is left behind -------------------------------------------------------------------


def test_what_a_reader_left_is_swept_by_the_next_retention(run: Run) -> None:
    """A reader that came between the two looks reads on without COMMIT; when it is done its files go."""
    save(run.url, 1, 2)
    known = Known()
    with contextlib.ExitStack() as reading:
        at = next(i for i, word in enumerate(operations_of(run)) if word == "delete step-00000001-w1.1/COMMIT")
        retain(meeting(run.url, at, lambda: reading.enter_context(run.reading(1)))[0], 1, known)
        assert live(run) == [2]
        assert folders(run.url) == ["step-00000001-w1.1", "step-00000002-w1.2"]
        retain(run, 1, known)
        assert "step-00000001-w1.1" in folders(run.url)
    retain(run, 1, known)
    assert folders(run.url) == ["step-00000002-w1.2"]


def operations_of(run: Run) -> list[str]:
    """Those of one retention, of which nothing is left."""
    counted, operations = meeting(shutil.copytree(run.url, f"{run.url}-counted"))
    retain(counted)
    return operations


def test_debris_of_older_writers_goes_in_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an hour that this process has counted itself, whatever the clock says; its own writer's stays."""
    save(run.url, 1)
    run.open_writer(job="again", world=1, resumed_from=1)
    old, own = Path(run.url, "step-00000002-w1.2"), Path(run.url, "step-00000004-w2.9")
    save(run.url, 3)
    for path in (old, own):
        path.mkdir()
        (path / "model-00000-of-00001.safetensors").write_bytes(b"x")
    known = Known()
    retain(run, 1, known)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 1e9)
    retain(run, 1, known)
    assert old.exists()
    now = time.monotonic
    monkeypatch.setattr(retention.time, "monotonic", lambda: now() + retention.SWEEP_AFTER_S + 1)
    retain(run, 1, known)
    assert not old.exists()
    assert own.exists()


# -- through a real keeper -----------------------------------------------------------------


def test_no_commit_waits_for_what_is_read_back(
    folder: Path,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the read-back of one save stands still, the next ones become steps; then one retention follows them all."""
    release, waiting, log = tmp_path / "release", tmp_path / "waiting", tmp_path / "log"
    monkeypatch.setenv(
        *next(iter(store_env(
            {"wrap": "recording", "program": "keeper", "log": log},
            {"wrap": "blocking", "program": "keeper", "operation": "read_into", "release": release, "waiting": waiting},
        ).items()))
    )  # fmt: skip
    with KeeperClient.connect(0) as client:
        pendings = [stage(client, url, step, step, keep_last=1) for step in (1, 2)]
        wait_for(waiting.exists, "the newest step is being read back")
        pendings += [stage(client, url, 3, 3, keep_last=1)]
        wait_for(lambda: committed(url) == [1, 2, 3], "step 3 is a step")
        assert not pendings[1].done
        assert not pendings[2].done
        release.touch()
        results = [pending.wait(30) for pending in pendings]
    assert committed(url) == [3]
    assert [result.warnings for result in results] == [(), (), ()]
    assert all(result.commit_s < 10 for result in results)
    deleted = [entry.key for entry in read_log(log) if entry.op == "delete_folder"]
    assert deleted == ["step-00000001-w1.1", "step-00000002-w1.2"]


def test_what_cannot_be_read_back_deletes_nothing(
    folder: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is committed, the old one stays, and the save's report and the keeper's log say why."""
    monkeypatch.setenv(
        *next(
            iter(store_env({"wrap": "faulty", "program": "keeper", "operation": "read_into", "errno": "EIO"}).items())
        )
    )
    with KeeperClient.connect(0) as client:
        assert stage(client, url, 1, 1, keep_last=1).wait(30).warnings == ()
        warnings = stage(client, url, 2, 2, keep_last=1).wait(30).warnings
    assert "step 2 (w1.2) does not verify" in warnings[0]
    assert warnings[1] == "retention: nothing was deleted: of the steps that would stay (2) none verifies"
    assert committed(url) == [1, 2]
    assert warnings[1] in "".join(path.read_text() for path in folder.glob("*.log"))


def test_reading_back_keeps_to_the_pace(
    folder: Path,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With max_write_mbps no more is read back in a second than is written."""
    log = tmp_path / "log"
    spec = {"wrap": "recording", "program": "keeper", "operation": "read_into", "match": "*.safetensors", "log": log}
    monkeypatch.setenv(*next(iter(store_env(spec).items())))
    with KeeperClient.connect(0) as client:
        for step in (1, 2):
            stage(client, url, step, step, keep_last=1, nbytes=80 << 20, max_write_mbps=150).wait(60)
    reads = read_log(log)
    assert sum(read.nbytes for read in reads) > 80 << 20
    # Five of 16 MiB. What was read is owed, and waited for after the next: the first two come at once.
    seconds = (reads[-1].start_ns - reads[0].start_ns) / 1e9
    assert seconds > 0.95 * 3 * (16 << 20) / 150e6


def test_a_retention_that_takes_long_is_not_waited_for(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save, and those that come meanwhile, are told that they are steps; what it deletes goes all the same."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'ckpt.keeper' in ' '.join(sys.orig_argv):\n"
        "    import ckpt.keeper.retention\n    ckpt.keeper.retention.PATIENCE_S = 0.2\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    release, waiting = tmp_path / "release", tmp_path / "waiting"
    spec = {"wrap": "blocking", "program": "keeper", "operation": "read_into", "release": release, "waiting": waiting}
    monkeypatch.setenv(*next(iter(store_env(spec).items())))
    with KeeperClient.connect(0) as client:
        for step in (1, 2, 3):
            result = stage(client, url, step, step, keep_last=1).wait(30)
            assert (result.step, result.warnings) == (step, ())
        assert waiting.exists()
        assert committed(url) == [1, 2, 3]
        release.touch()
        wait_for(lambda: folders(url) == ["step-00000003-w1.3"], "the old steps are deleted")
