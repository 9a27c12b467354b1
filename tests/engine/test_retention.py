from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from ckpt.engine.retention import over_since, prune
from ckpt.errors import BadInputError, NotFoundError
from ckpt.format.commit import COMMIT, Attempt
from ckpt.format.layout import layout_key
from ckpt.format.writer import encode_writer, writer_key
from ckpt.reading.verify import verify
from ckpt.run import Run, Survey
from ckpt.testing.handmade import HandTensor, write_step

HOUR_S = 3600.0


@pytest.fixture
def run(tmp_path):
    return Run.open(tmp_path / "run")


def write(run, step, *, names=("x",), created_unix_s=None, **options):
    tensors = [HandTensor(name, "uint8", (100,), bytes([step % 256]) * 100) for name in names]
    return write_step(run, step, tensors, created_unix_s=created_unix_s, **options)


def age_writers(run, seconds):
    """Make every writer record older; nothing else in a store has a time."""
    for writer in run.writers():
        aged = msgspec.structs.replace(writer, created_unix_s=writer.created_unix_s - seconds)
        (Path(run.url) / writer_key(writer.number)).write_bytes(encode_writer(aged))


def folders(run):
    return sorted(path.name for path in Path(run.url).glob("step-*"))


def test_nothing_to_do(run):
    """A run of good steps keeps all of them."""
    write(run, 1)
    write(run, 2)
    report = prune(run)
    assert (report.removed, report.removed_layouts, report.kept) == ((), (), ())
    assert [state.attempt.step for state in run.survey().live] == [1, 2]


def test_an_attempt_that_may_be_under_way_stays(run):
    """The newest writer's attempt after its last step stays, however old the writer is."""
    write(run, 1, created_unix_s=time.time() - 90 * HOUR_S)
    write(run, 2, commit=False)
    age_writers(run, 100 * HOUR_S)
    report = prune(run, grace_s=0)
    assert report.removed == ()
    assert [kept.what for kept in report.kept] == ["step-00000002-w1.2"]
    assert "may be under way" in report.kept[0].why


def test_an_orphan_of_an_older_writer_goes_after_the_grace_period(run):
    """Once a newer writer has been there for the grace period, the attempt cannot become a step."""
    write(run, 1)
    write(run, 2, commit=False)
    run.open_writer(job="again", world=1, resumed_from=1)
    assert [kept.what for kept in prune(run).kept] == ["step-00000002-w1.2"]
    assert folders(run) == ["step-00000001-w1.1", "step-00000002-w1.2"]
    report = prune(run, now_unix_s=time.time() + HOUR_S + 1, dry_run=True)
    assert [(removed.folder, removed.state) for removed in report.removed] == [("step-00000002-w1.2", "incomplete")]
    assert report.removed_nbytes > 100
    assert len(folders(run)) == 2
    prune(run, now_unix_s=time.time() + HOUR_S + 1)
    assert folders(run) == ["step-00000001-w1.1"]


def test_an_orphan_before_a_later_step_of_its_writer_goes(run):
    """Saves of a writer commit in order: a later COMMIT says that the attempt failed."""
    write(run, 1, commit=False)
    write(run, 2)
    now = time.time()
    assert prune(run, now_unix_s=now).removed == ()
    assert [r.folder for r in prune(run, now_unix_s=now + HOUR_S + 1).removed] == ["step-00000001-w1.1"]


def test_over_since_is_the_first_proof(run):
    """The earliest of a newer writer and a later step of the same writer starts the clock."""
    write(run, 1, commit=False)
    write(run, 2, created_unix_s=500.0)
    run.open_writer(job="again", world=1, resumed_from=2)
    survey = run.survey()
    assert over_since(Attempt(1, 1, 1), survey) == 500.0
    assert over_since(Attempt(1, 1, 9), survey) == survey.writers[1].created_unix_s
    assert over_since(Attempt(1, 2, 1), survey) is None
    assert over_since(Attempt(1, 1, 1), Survey([], [])) is None


def superseded_and_abandoned(run):
    for step in (1, 2, 3):
        write(run, step)
    run.open_writer(job="again", world=1, resumed_from=1)
    write(run, 2)
    write(run, 2)


def test_what_is_not_live_goes_only_when_asked(run):
    """Superseded and abandoned steps stay, unless --abandoned says otherwise."""
    superseded_and_abandoned(run)
    assert prune(run, now_unix_s=time.time() + 9 * HOUR_S).removed == ()
    report = prune(run, not_live=True)
    assert [(r.folder, r.state) for r in report.removed] == [
        ("step-00000002-w1.2", "abandoned"),
        ("step-00000002-w2.1", "superseded"),
        ("step-00000003-w1.3", "abandoned"),
    ]
    assert folders(run) == ["step-00000001-w1.1", "step-00000002-w2.2"]


def test_keep_last(run):
    """--keep-last K keeps the newest K live steps, one of which was verified before older ones went."""
    superseded_and_abandoned(run)
    write(run, 5)
    report = prune(run, keep_last=2)
    assert folders(run) == ["step-00000002-w2.2", "step-00000005-w2.3"]
    assert report.verified_step == 5
    assert [r.state for r in report.removed] == ["live", "abandoned", "superseded", "abandoned"]


def damage(run, step):
    path = next(Path(run.url).glob(f"step-{step:08d}-*/state-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_the_last_step_that_verifies_stays(run):
    """When no step that would stay is whole, the newest older one that is stays too."""
    for step in (1, 2, 3, 4):
        write(run, step)
    damage(run, 3)
    damage(run, 4)
    report = prune(run, keep_last=1)
    assert folders(run) == ["step-00000002-w1.2", "step-00000004-w1.4"]
    assert report.verified_step == 2
    assert verify(run, 2).ok
    assert [kept.what for kept in report.kept] == ["step-00000004-w1.4", "step-00000003-w1.3", "step-00000002-w1.2"]


def test_nothing_live_goes_when_nothing_verifies(run):
    """Without a whole step there is nothing to fall back to, so every live step stays."""
    for step in (1, 2):
        write(run, step)
        damage(run, step)
    report = prune(run, keep_last=1)
    assert (len(folders(run)), report.verified_step) == (2, None)
    assert report.kept[-1].what == "every live step"


def test_a_torn_commit_goes_only_when_asked(run):
    """An attempt whose COMMIT is damaged may have whole data: it is removed by --abandoned alone."""
    write(run, 1)
    attempt = write(run, 2)
    (Path(run.url) / attempt.folder / COMMIT).write_bytes(b"{}")
    later = time.time() + 9 * HOUR_S
    assert prune(run, keep_last=1, now_unix_s=later).removed == ()
    assert [r.state for r in prune(run, not_live=True).removed] == ["damaged"]


def unneeded_layout(run):
    """A run in which only a removed step needed one of the layouts; its digest."""
    attempt = write(run, 1, names=("old",), created_unix_s=time.time() - 9 * HOUR_S)
    digest = run.read_commit(attempt).layouts[0].digest
    write(run, 2, names=("new",), created_unix_s=time.time() - 8 * HOUR_S)
    age_writers(run, 10 * HOUR_S)
    return digest


def test_unneeded_layouts_go(run):
    """A layout that no step needs goes, once nothing was written for the grace period."""
    digest = unneeded_layout(run)
    report = prune(run, keep_last=1, dry_run=True)
    assert report.removed_layouts == (digest,)
    assert run.store.exists(layout_key(digest))
    report = prune(run, keep_last=1)
    assert report.removed_layouts == (digest,)
    assert not run.store.exists(layout_key(digest))
    assert verify(run).ok


def test_layouts_stay_while_something_may_need_them(run):
    """A run that is written to, or has an attempt that may be under way, keeps its layouts."""
    digest = unneeded_layout(run)
    report = prune(run, keep_last=1, grace_s=20 * HOUR_S)
    assert [kept.what for kept in report.kept] == [layout_key(digest)]
    write(run, 3, names=("new",), commit=False)
    report = prune(run)
    assert {kept.what for kept in report.kept} == {layout_key(digest), "step-00000003-w1.3"}
    assert run.store.exists(layout_key(digest))


def test_a_layout_that_was_just_taken_up_comes_back(run, monkeypatch):
    """When a save commits with the layout in the moment of its removal, the layout is put back."""
    digest = unneeded_layout(run)
    prune(run, keep_last=1, grace_s=20 * HOUR_S)
    delete = run.store.delete

    def delete_while_a_save_commits(key):
        if key == layout_key(digest):
            write(run, 9, names=("old",))
        delete(key)

    monkeypatch.setattr(run.store, "delete", delete_while_a_save_commits)
    report = prune(run)
    assert report.removed_layouts == ()
    assert report.kept[-1].why == "a save has just taken it up"
    assert verify(Run.open(run.url), 9).ok


def test_bad_input(run, tmp_path):
    """No run, nothing to keep and a negative time are refused."""
    with pytest.raises(NotFoundError, match="no run here"):
        prune(run)
    with pytest.raises(BadInputError, match="at least one live step stays"):
        prune(run, keep_last=0)
    with pytest.raises(BadInputError, match="give 0 or more seconds"):
        prune(run, grace_s=-1)
    with pytest.raises(BadInputError, match="give 0 or more seconds"):
        prune(run, grace_s=float("nan"))
