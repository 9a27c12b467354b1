"""What makes parts a step: agreement, several nodes, fencing, time-outs, retention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, DamagedError, RankError, StoreError
from ckpt.format.commit import Attempt, FileRef
from ckpt.keeper.client import KeeperClient, settle
from ckpt.keeper.commit import check_agreement, read_part
from ckpt.keeper.protocol import LayoutTask
from ckpt.keeper.saves import Failure, SeenPart, name_ranks
from ckpt.run import Run
from ckpt.testing import read_log, store_env
from tests.keeper.conftest import Trainer, TrainerError
from tests.keeper.rank_process import stage
from tests.keeper.steps import check_step, committed, folders

Trainers = Callable[..., Trainer]


def part(rank: int, layout: str, **digests: str) -> SeenPart:
    """A rank's part, as far as agreement goes; ``group_x`` stands for ``group:x``."""
    named = {key.replace("group_", "group:"): digest for key, digest in digests.items()}
    return SeenPart(rank, FileRef(f"part-{rank}", 1, "d"), layout, named, False, 1)


ONE = (LayoutTask("A", b"", ((0, 2),)),)
TWO = (LayoutTask("A", b"", ((0, 0),)), LayoutTask("B", b"", ((1, 2),)))


@pytest.mark.parametrize(
    ("layouts", "parts", "problem"),
    [
        (ONE, [part(0, "A", epoch="1"), part(1, "A", epoch="1"), part(2, "A", epoch="1")], None),
        (ONE, [part(0, "A", epoch="1"), part(1, "A", epoch="1"), part(2, "A", epoch="2")],
         r"state\['epoch'\]: rank 0 and rank 2"),
        (ONE, [part(0, "A", epoch="1"), part(1, "A"), part(2, "A", epoch="1")], r"state\['epoch'\]: rank 0 and rank 1"),
        (ONE, [part(0, "A"), part(1, "A", lr="1"), part(2, "A")], r"state\['lr'\]: rank 0 and rank 1"),
        (ONE, [part(0, "A", group_model="1"), part(1, "A", group_model="2"), part(2, "A", group_model="1")],
         r"state\['model'\]: rank 0 and rank 1"),
        (ONE, [part(0, "A"), part(1, "B"), part(2, "A")], "rank 1 has layout B, rank 0 planned A"),
        (TWO, [part(0, "A", group_model="1"), part(1, "B", group_model="2"), part(2, "B", group_model="2")], None),
        (TWO, [part(0, "A", epoch="1", only_a="1"), part(1, "B", epoch="1"), part(2, "B", epoch="1")], None),
        (TWO, [part(0, "A", epoch="1"), part(1, "B", epoch="2"), part(2, "B", epoch="2")],
         r"state\['epoch'\]: rank 0 and rank 1"),
    ],
)  # fmt: skip
def test_agreement(layouts: tuple, parts: list, problem: str | None):
    """Values agree between all ranks, those of modules within a layout only; each rank has its planned layout."""
    if problem is None:
        check_agreement(parts, layouts)
    else:
        with pytest.raises(BadInputError, match=problem):
            check_agreement(parts, layouts)


def test_failures_are_told_to_each_rank_in_its_way():
    """The rank that failed gets its own error; the others get a RankError that names it, or what concerns all."""
    attempt = Attempt(3, 1, 2)
    own = Failure("StoreError", "full", 1)
    assert type(own.error_for(1, attempt)).__name__ == "StoreError"
    assert str(own.error_for(1, attempt)) == "save of step 3 (w1.2) failed: full"
    assert type(own.error_for(0, attempt)).__name__ == "RankError"
    assert own.error_for(0, attempt).exit_code == own.error_for(1, attempt).exit_code == StoreError.exit_code
    assert Failure("RankError", "rank 1: full", 1, StoreError.exit_code).error_for(1, attempt).exit_code == 8
    assert RankError.exit_code == 11
    assert str(own.error_for(0, attempt)) == "save of step 3 (w1.2) failed: rank 1: StoreError: full"
    assert type(Failure("FencedError", "held", None).error_for(5, attempt)).__name__ == "FencedError"
    assert str(Failure("RankError", "rank 1 died", 1).error_for(0, attempt)).endswith("failed: rank 1 died")


def test_ranks_are_named_in_short():
    """Thousands of ranks make no long sentence."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 2, 3, 4, 0]) == "ranks 0, 2-5"
    assert name_ranks(range(0, 100, 2)).endswith(" 22 and 38 more")


def test_differing_values_fail_the_save(trainers: Trainers, url: str):
    """Two ranks whose plain values differ: both are told which value and which ranks; nothing is left."""
    ranks = [trainers(0), trainers(1)]
    for rank, value in zip(ranks, "12", strict=True):
        rank.save(3, world=2, digests={"lr": value * 32, "group:model": "0" * 32})
    for rank in ranks:
        with pytest.raises(TrainerError, match=r"state\['lr'\]: rank 0 and rank 1 have different values") as caught:
            rank.wait(3)
        assert caught.value.kind == "BadInputError"
    assert folders(url) == []
    for rank in ranks:
        rank.save(4, world=2)
    for rank in ranks:
        rank.wait(4)
    check_step(url, 4, world=2)


def test_two_nodes_commit_through_the_store(trainers: Trainers, url: str):
    """Each node's keeper knows its own ranks only; parts and COMMIT are found in the store."""
    here = [trainers(0, CKPT_JOB="node-a"), trainers(1, CKPT_JOB="node-a")]
    there = [trainers(2, CKPT_JOB="node-b"), trainers(3, CKPT_JOB="node-b")]
    assert len({rank.keeper_pid for rank in here + there}) == 2
    for step in (1, 2):
        for rank in there + here:
            rank.save(step, world=4)
        for rank in there + here:
            assert rank.wait(step)["attempt"] == f"w1.{step}"
        check_step(url, step, world=4)


def test_a_failure_on_another_node_is_told(trainers: Trainers, url: str):
    """A node whose store is full leaves a marker; the other node's ranks learn of it and of its cause."""
    full = store_env({"wrap": "faulty", "program": "keeper", "match": "*.safetensors", "errno": "ENOSPC"})
    here, there = trainers(0, CKPT_JOB="node-a"), trainers(1, CKPT_JOB="node-b", **full)
    for rank in (here, there):
        rank.hand_over(1, world=2, progress_timeout_s=3600)
    with pytest.raises(TrainerError, match="no space left") as caught:
        there.wait(1)
    assert caught.value.kind == "StoreError"
    with pytest.raises(TrainerError, match=r"rank 1: StoreError: .*no space left") as caught:
        here.wait(1)
    assert caught.value.kind == "RankError"
    assert committed(url) == []
    assert [path.name for path in Path(url, "step-00000001-w1.1").iterdir()] == ["failed-00001-of-00002.json"]


def test_a_trainer_that_gives_up_tells_the_other_node(trainers: Trainers, url: str):
    """``abandon`` fails the save everywhere, without waiting for a time-out."""
    here, there = trainers(0, CKPT_JOB="node-a"), trainers(1, CKPT_JOB="node-b")
    here.save(1, world=2, progress_timeout_s=3600)
    there.do("borrow", run=url, nbytes=100)
    there.do("borrow", run=url, nbytes=100)
    there.do("abandon", run=url, step=1, save=1, world=2, message="UnsupportedValueError: a lambda")
    with pytest.raises(TrainerError, match="rank 1: UnsupportedValueError: a lambda"):
        here.wait(1)
    there.save(2, world=2)  # its arenas were freed
    here.save(2, world=2)
    here.wait(2)


def test_a_rank_that_comes_too_late_for_a_failed_save(trainers: Trainers, url: str):
    """It is told why the save failed, and writes nothing."""
    first, second = trainers(0), trainers(1)
    second.do("abandon", run=url, step=1, save=1, world=2, message="changed its mind")
    assert settle(url, 10) == []
    with pytest.raises(TrainerError, match="rank 1: changed its mind"):
        first.save(1, world=2)
    assert folders(url) == []


def test_no_progress(trainers: Trainers, url: str):
    """A save whose other ranks never come fails after progress_timeout_s and names them, on either side of rank 0."""
    first, third = trainers(0, CKPT_JOB="node-a"), trainers(2, CKPT_JOB="node-b")
    first.save(1, world=5, progress_timeout_s=0.8)
    third.save(1, world=5, progress_timeout_s=3600)
    with pytest.raises(TrainerError, match=r"no progress for 0\.8 s: no part from ranks 1, 3-4 of 5"):
        first.wait(1)
    with pytest.raises(TrainerError, match=r"no part from ranks 1, 3-4 of 5"):
        third.wait(1)
    third.save(2, world=5, progress_timeout_s=0.5)
    with pytest.raises(TrainerError, match=r"no COMMIT from rank 0's node, which may wait for ranks 0-1, 3-4"):
        third.wait(2)


def test_a_slow_rank_makes_progress(trainers: Trainers, url: str):
    """A node whose files take longer than the time-out, but grow, fails nothing."""
    slow = store_env({"wrap": "slow", "program": "keeper", "operation": "write", "delay_s": 0.3})
    here, there = trainers(0, CKPT_JOB="node-a"), trainers(1, CKPT_JOB="node-b", **slow)
    for rank in (here, there):
        rank.save(1, world=2, nbytes=40 << 20, progress_timeout_s=1.2)  # five blocks and a rest: 1.8 s
    for rank in (here, there):
        rank.wait(1)
    check_step(url, 1, world=2)


def test_a_fenced_writer_commits_nothing(folder: Path, url: str):
    """A newer writer holds the run: the error says who, and nothing is left of the attempt."""
    Run.open(url).open_writer(job="the new job", world=1, resumed_from=None)
    with KeeperClient.connect(0) as client:
        pending = stage(client, url, 1, 1)
        with pytest.raises(Exception, match="the new job") as caught:
            pending.wait(30)
    assert type(caught.value).__name__ == "FencedError"
    assert folders(url) == []


def test_retention_after_commit(folder: Path, url: str):
    """Older steps go once the newer one is committed; multiples of keep_every stay."""
    with KeeperClient.connect(0) as client:
        for step in (1, 2, 3, 4, 5):
            stage(client, url, step, step, keep_last=2, keep_every=2).wait(30)
            assert step in committed(url)
    assert committed(url) == [2, 4, 5]


def test_commit_comes_last_and_retention_after_it(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The order of what changes the store: data, part, layout, COMMIT, then the old step's COMMIT goes first."""
    log = tmp_path / "log"
    for name, value in store_env({"wrap": "recording", "program": "keeper", "log": log}).items():
        monkeypatch.setenv(name, value)
    with KeeperClient.connect(0) as client:
        for step in (1, 2):
            stage(client, url, step, step, keep_last=1, nbytes=20 << 20).wait(30)
    done = [
        (entry.op, entry.key)
        for entry in read_log(log)
        if entry.op not in {"get", "list", "size", "read_into", "abort"}
    ]
    name = "step-00000002-w1.2"
    second = [(op, key) for op, key in done if name in key]
    file = f"{name}/model-00000-of-00001.safetensors"
    assert second == [
        ("open_sink", file), ("write", file), ("write", file), ("write", file), ("close", file),
        ("create", f"{name}/part-00000-of-00001.json"), ("create", f"{name}/COMMIT"),
    ]  # fmt: skip
    after = done[done.index(("create", f"{name}/COMMIT")) + 1 :]
    assert after == [("delete", "step-00000001-w1.1/COMMIT"), ("delete_folder", "step-00000001-w1.1")]


def test_retention_that_fails_is_a_warning(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """The step is committed all the same, and the old one is named."""
    for name, value in store_env(
        {"wrap": "faulty", "program": "keeper", "operation": "delete", "errno": "EACCES"}
    ).items():
        monkeypatch.setenv(name, value)
    with KeeperClient.connect(0) as client:
        assert stage(client, url, 1, 1, keep_last=1).wait(30).warnings == ()
        (warning,) = stage(client, url, 2, 2, keep_last=1).wait(30).warnings
    assert "step 1 (w1.1) was not deleted" in warning
    assert committed(url) == [1, 2]
    assert warning in "".join(path.read_text() for path in folder.glob("*.log"))


def test_an_hf_index_is_pinned(folder: Path, url: str):
    """The index that rank 0 gives is stored beside the files and pinned by COMMIT."""
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1, hf_index=b'{"weight_map": {}}').wait(30)
    run = Run.open(url)
    commit = run.find(1).commit
    assert commit is not None
    (reference,) = commit.files
    raw = run.pinned_file(Attempt(1, 1, 1), reference.name, reference.nbytes, reference.digest)
    assert (reference.name, raw) == ("model.safetensors.index.json", b'{"weight_map": {}}')


def test_a_part_of_another_attempt_is_refused(folder: Path, url: str):
    """A part that another node wrote must say that it is of this attempt, world and rank."""
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1).wait(30)
    run, name = Run.open(url), "part-00000-of-00001.json"
    assert read_part(run, Attempt(1, 1, 1), 1, 0, name).rank == 0
    raw = run.store.get(run.key(Attempt(1, 1, 1), name))
    run.store.create(run.key(Attempt(1, 1, 2), name), raw)
    with pytest.raises(DamagedError, match="expected"):
        read_part(run, Attempt(1, 1, 2), 1, 0, name)
