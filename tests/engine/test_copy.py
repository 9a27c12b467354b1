from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import fsspec
import msgspec
import pytest

from ckpt.engine.copy import COPIED, DAMAGED, THERE, copy_steps
from ckpt.engine.retention import prune
from ckpt.errors import BadInputError, CkptError, DamagedError, NotFoundError, StoreError
from ckpt.format.commit import COMMIT, Attempt, encode_commit
from ckpt.format.parity import record_name
from ckpt.format.values import ModuleNode
from ckpt.format.writer import encode_writer
from ckpt.holds import look
from ckpt.plan.boxes import whole_box
from ckpt.plan.live import LIVE
from ckpt.reading.step import StepReader
from ckpt.reading.tiers import tiered
from ckpt.reading.verify import verify
from ckpt.run import Run
from ckpt.store import LocalStore, open_store
from ckpt.testing import Crash, CrashStore, FaultyStore, RecordingStore
from ckpt.testing.handmade import HandTensor, write_step
from tests.store import objects

ROWS = 600_000  # of 16 float32: one rank's half has two chunks
FEW = 4096


def content(step: int, rows: int) -> bytes:
    """Bytes that compress, and tell their step."""
    return random.Random(step).randbytes(64) * rows


def write(
    run: Run, step: int, *, rows: int = 64, encoding: str = "raw", writer: int | None = None, parity: bool = False
) -> Attempt:
    """A step of two ranks; ``rows`` decides how large."""
    tensors = [
        HandTensor("model.w", "float32", (rows, 16), content(step, rows), "model", (2,), ("S0",)),
        HandTensor("model.b", "bfloat16", (7,), bytes([step % 256]) * 14, "model"),
        HandTensor("optimizer.state.m.model.b", "float32", (7,), bytes(28), "optimizer"),
    ]
    values = {"model": ModuleNode("model", {}), "epoch": step}
    sets = [(0, 1)] if parity else []
    return write_step(run, step, tensors, world=2, values=values, encoding=encoding, writer=writer, parity=sets)


@pytest.fixture
def source(tmp_path: Path) -> Run:
    """Steps 100, 200 and 300, the second of them compressed."""
    run = Run.open(tmp_path / "source")
    for step in (100, 200, 300):
        write(run, step, encoding="zstd" if step == 200 else "raw")
    return run


@pytest.fixture
def target(tmp_path: Path) -> Run:
    """Nothing yet."""
    return Run.open(tmp_path / "far" / "copy")


def tree(run: Run | str | Path, without: str = "holds/") -> dict[str, bytes]:
    """Every object of a store."""
    store = run.store if isinstance(run, Run) else open_store(run)
    found: dict[str, bytes] = {}

    def walk(prefix: str) -> None:
        for name in store.list(prefix):
            key = f"{prefix}/{name}" if prefix else name
            if store.exists(key):
                found[key] = store.get(key)
            else:
                walk(key)

    walk("")
    return {key: data for key, data in found.items() if not key.startswith(without)}


def states(run: Run) -> dict[str, str]:
    """Attempt -> its state."""
    return {state.attempt.folder: state.state for state in run.survey().steps}


# -- what is copied -----------------------------------------------------------------------------


def test_all_live_steps(source, target):
    """The same objects with the same bytes, COMMIT last in each step, writers before all of them."""
    recorded = RecordingStore(target.store)
    report = copy_steps(source, Run(recorded), every_step=True)
    assert report.ok
    assert [(step.step, step.attempt, step.outcome) for step in report.steps] == [
        (100, "w1.1", COPIED), (200, "w1.2", COPIED), (300, "w1.3", COPIED),
    ]  # fmt: skip
    assert report.writers == 1
    assert tree(target) == tree(source)
    assert verify(target).ok
    made = [done.key for done in recorded.done if done.op in {"create", "close"} and done.outcome == "ok"]
    assert made[0] == "writers/000001.json"
    for folder in states(source):
        of_step = [key for key in made if key.startswith(folder)]
        assert of_step[-1] == f"{folder}/COMMIT"
        for rank in range(2):
            part = of_step.index(f"{folder}/part-{rank:05d}-of-00002.json")
            assert all(of_step.index(key) < part for key in of_step if f"-{rank:05d}-of" in key and "part" not in key)
    assert look(source.store) == ({}, []), "the reader's hold is let go"


def test_one_step(source, target, tmp_path):
    """The latest, or the one asked for; steps of the same structure share a layout."""
    report = copy_steps(source.url, target.url)
    assert [step.step for step in report.steps] == [300]
    assert states(target) == {"step-00000300-w1.3": LIVE}
    copy_steps(source.url, target.url, step=100)
    assert sorted(states(target)) == ["step-00000100-w1.1", "step-00000300-w1.3"]
    assert tree(target).items() <= tree(source).items()
    with pytest.raises(NotFoundError, match="no live step 150; live steps: 100, 200, 300"):
        copy_steps(source, tmp_path / "other", step=150)
    assert not (tmp_path / "other").exists()


def test_everything_that_is_pinned(source, target):
    """The parity file, pinned by its record, goes with it; what nothing pins stays behind."""
    attempt = write(source, 400, rows=FEW, parity=True)
    (Path(source.url) / attempt.folder / "config.json").write_text("{}")
    report = copy_steps(source, target)
    assert report.ok
    found = tree(target)
    assert f"{attempt.folder}/parity-00000-of-00002.xor" in found
    assert f"{attempt.folder}/config.json" not in found
    assert found.items() <= tree(source).items()
    assert report.steps[0].files == 2 + 1 + 2 + 2  # model, optimizer, parts, parity and its record


def test_a_copy_is_a_tier(source, target):
    """Same run, same attempts: what is damaged here comes from there."""
    write(source, 400, rows=FEW)
    copy_steps(source, target)
    damage(source, 400, -5)
    assert not verify(source).ok
    reader = StepReader.open(tiered(source, [target.url]))
    into = bytearray(FEW * 16 * 4)
    reader.read("model.w", whole_box((FEW, 16)), memoryview(into))
    assert into == content(400, FEW)
    assert [repaired.source for repaired in reader.repaired()] == [target.url]


def damage(run: Run, step: int, at: int, name: str = "model-00001-of-00002.safetensors") -> None:
    """Flip a bit of a file of the step."""
    (folder,) = Path(run.url).glob(f"step-{step:08d}-*")
    raw = bytearray((folder / name).read_bytes())
    raw[at] ^= 1
    (folder / name).write_bytes(raw)


# -- what is there already ------------------------------------------------------------------------


def test_again_and_later(source, target):
    """What is committed there is left alone; a rollback at the source reaches the copy with its record."""
    copy_steps(source, target, every_step=True)
    again = copy_steps(source, Run(FaultyStore(target.store, operation="mutating")), every_step=True)
    assert [step.outcome for step in again.steps] == [THERE] * 3
    source.rollback(100)
    write(source, 150, writer=source.open_writer(job="again", world=2, resumed_from=100).number)
    report = copy_steps(source, target, every_step=True)
    assert [(step.step, step.outcome) for step in report.steps] == [(100, THERE), (150, COPIED)]
    assert report.writers == 2
    assert [state.attempt.step for state in target.survey().live] == [100, 150]
    assert states(target) == states(source)


def test_resumed(source, target):
    """Files that are whole are kept, those that are short or altered are made anew."""
    write(source, 400, rows=FEW)
    copy_steps(source, target)
    folder = Path(target.url) / "step-00000400-w1.4"
    (folder / "COMMIT").unlink()
    (folder / "part-00001-of-00002.json").write_bytes(b"{")
    damage(target, 400, 5000, "model-00000-of-00002.safetensors")
    os.truncate(folder / "model-00001-of-00002.safetensors", 100_000)
    report = copy_steps(source, target)
    (step,) = report.steps
    assert (step.outcome, step.files, step.skipped_files) == (COPIED, 3, 2)
    assert step.skipped_nbytes < 20_000
    assert tree(target).items() <= tree(source).items()
    assert verify(target).ok


def test_a_torn_record_of_a_stopped_copy(source, target):
    """Where nothing is created whole a stopped copy leaves a torn record: the next one makes it again."""
    copy_steps(source, target)
    for name in ("writers/000001.json", "step-00000300-w1.3/COMMIT"):
        os.truncate(f"{target.url}/{name}", 40)
    report = copy_steps(source, target)
    assert (report.writers, report.steps[0].outcome) == (1, COPIED)
    assert tree(target).items() <= tree(source).items()


def test_liveness_is_that_of_the_writers(source, target, tmp_path):
    """A stopped copy has the first writers and shows what was live then."""
    number = source.open_writer(job="again", world=2, resumed_from=200).number
    write(source, 250, writer=number)
    store = CrashStore(target.store, at=1, how="raise", operation=["create"])
    with pytest.raises(Crash):
        copy_steps(source, Run(store), every_step=True)
    assert [writer.number for writer in target.writers()] == [1]
    copy_steps(source, target, every_step=True)
    assert [state.attempt.step for state in target.survey().live] == [100, 200, 250]


# -- damage at the source -----------------------------------------------------------------------


def test_damage_is_named_and_nothing_committed(source, target):
    """Every damaged chunk with its tensor, a missing file, a part; other steps are copied all the same."""
    attempt = write(source, 400, rows=ROWS)
    damage(source, 400, 4096 + 16)
    damage(source, 400, -1)
    damage(source, 400, 20, "optimizer-00000-of-00002.safetensors")
    os.remove(f"{source.url}/{attempt.folder}/model-00000-of-00002.safetensors")
    damage(source, 300, 50, "part-00000-of-00002.json")
    report = copy_steps(source, target, every_step=True)
    assert not report.ok
    assert [(step.step, step.outcome) for step in report.steps] == [
        (100, COPIED), (200, COPIED), (300, DAMAGED), (400, DAMAGED),
    ]  # fmt: skip
    found = {(p.file.partition("/")[2], p.tensor, p.chunk) for p in report.problems if attempt.folder in p.file}
    tensor = "model.w[300000:600000,0:16]"
    assert found == {
        ("model-00000-of-00002.safetensors", None, None),
        ("model-00001-of-00002.safetensors", tensor, 0),
        ("model-00001-of-00002.safetensors", tensor, 1),
        ("optimizer-00000-of-00002.safetensors", None, None),
    }
    (part,) = [problem for problem in report.problems if "part-" in problem.file]
    assert "COMMIT says" in part.what
    assert [state.attempt.step for state in target.survey().live] == [100, 200]
    assert not (Path(target.url) / attempt.folder / "model-00001-of-00002.safetensors").exists()


@pytest.mark.parametrize("change", ["cut", "longer", "layout", "xor", "record"])
def test_other_damage(source, target, change):
    """A file that is too short or too long, a layout, the parity file, a pinned file."""
    attempt = write(source, 400, rows=ROWS if change == "xor" else FEW, parity=True)
    folder = Path(source.url) / attempt.folder
    data, xor = folder / "model-00000-of-00002.safetensors", folder / "parity-00000-of-00002.xor"
    if change == "cut":
        os.truncate(data, 5000)
    elif change == "longer":
        data.write_bytes(data.read_bytes() + b"x")
    elif change == "layout":
        digest = source.read_commit(attempt).layouts[0].digest
        os.truncate(f"{source.url}/layouts/{digest}.json", 100)
    elif change == "xor":
        damage(source, 400, 17 << 20, xor.name)
    else:
        (folder / record_name(0, 2)).write_bytes(b"{}")
    report = copy_steps(source, target)
    assert [step.outcome for step in report.steps] == [DAMAGED]
    assert report.problems
    assert target.survey().live == []
    if change == "xor":
        assert [(problem.file.partition("/")[2], problem.chunk) for problem in report.problems] == [(xor.name, 1)]


def test_damaged_compressed_chunks(source, target):
    """A pack's chunks are decoded to be compared, and copied as they are stored."""
    copy_steps(source, target, step=200)
    assert tree(target).items() <= tree(source).items()
    damage(source, 200, 30, "model-00001-of-00002.pack")
    shutil.rmtree(target.url)
    report = copy_steps(source, target, step=200)
    assert [step.outcome for step in report.steps] == [DAMAGED]
    assert report.problems[0].tensor == "model.w[32:64,0:16]"


def test_a_commit_that_is_damaged_is_passed_over(source, target):
    """The newest step that there is is copied, and what was passed over is said."""
    damage(source, 300, 3, COMMIT)
    report = copy_steps(source, target)
    assert [step.step for step in report.steps] == [200]
    (skipped,) = report.skipped
    assert skipped.startswith("step-00000300-w1.3 is damaged (")
    with pytest.raises(DamagedError):
        copy_steps(source, target, step=300)


# -- places that are no place ---------------------------------------------------------------------


def test_another_run(source, target, tmp_path):
    """The same writer number with another nonce is another run; so is one without a writer in common, or no run."""
    write(target, 100)
    before = tree(target)
    with pytest.raises(BadInputError, match=r"is another run: its writer 1 is not the one of .*source"):
        copy_steps(source, target)
    assert tree(target) == before
    other = Run.open(tmp_path / "third")
    write(other, 100)
    second = msgspec.structs.replace(other.writer(1), number=2)
    os.unlink(f"{other.url}/writers/000001.json")
    Path(other.url, "writers", "000002.json").write_bytes(encode_writer(second))
    with pytest.raises(BadInputError, match="no writer in common"):
        copy_steps(source, other)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").touch()
    with pytest.raises(BadInputError, match="not a ckpt run"):
        copy_steps(source, tmp_path / "folder")


def test_the_same_place(source, tmp_path):
    """By any name, and inside of it."""
    (tmp_path / "link").symlink_to(source.url)
    for same in (
        source.url,
        f"{source.url}/",
        f"file://{source.url}",
        f"fsspec+file://{source.url}",
        tmp_path / "link",
    ):
        with pytest.raises(BadInputError, match="the same place"):
            copy_steps(source.url, same)
    for inside in (f"{source.url}/copy", tmp_path / "link" / "a" / "b", f"fsspec+file://{source.url}/copy"):
        with pytest.raises(BadInputError, match="lies inside the source"):
            copy_steps(source.url, inside)
    with pytest.raises(NotFoundError, match="no run here"):
        copy_steps(tmp_path / "absent", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_another_commit_there(source, target):
    """Never replaced."""
    copy_steps(source, target)
    key = "step-00000300-w1.3/COMMIT"
    commit = source.read_commit(Attempt(300, 1, 3))
    fields = {name: getattr(commit, name) for name in commit.__struct_fields__}
    other = encode_commit(type(commit)(**{**fields, "written_by": "someone else"}))
    target.store.delete(key)
    target.store.create(key, other)
    with pytest.raises(BadInputError, match="another COMMIT"):
        copy_steps(source, target)
    assert target.store.get(key) == other


# -- stores that misbehave ------------------------------------------------------------------------


def test_between_kinds_of_stores(source, tmp_path, monkeypatch):
    """A path, this process's memory, object storage: there and back the bytes are the same."""
    objects.reach_keepers(monkeypatch, tmp_path)
    memory = f"memory://{tmp_path.name}"
    try:
        places = [
            source.url,
            memory,
            f"object://{tmp_path}/objects",
            f"fsspec+file://{tmp_path}/files",
            tmp_path / "back",
        ]
        for here, there in itertools.pairwise(places):
            assert copy_steps(here, there, every_step=True).ok
            assert tree(there) == tree(source)
        assert verify(memory).ok
    finally:
        filesystem = fsspec.filesystem("memory")
        if filesystem.exists(f"/{tmp_path.name}"):
            filesystem.rm(f"/{tmp_path.name}", recursive=True)


def test_an_error_of_either_store(source, target):
    """It comes as it is, nothing is committed, and the next copy goes on."""
    full = FaultyStore(target.store, errno="ENOSPC", match="part-00001*", operation="create")
    with pytest.raises(StoreError, match="no space left"):
        copy_steps(source, Run(full))
    assert target.survey().live == []
    broken = FaultyStore(source.store, errno="ETIMEDOUT", match="part-00001*", operation="get")
    with pytest.raises(StoreError, match="cannot read"):
        copy_steps(Run(broken), target)
    report = copy_steps(source, target)
    assert report.steps[0].skipped_files > 0
    assert tree(target).items() <= tree(source).items()


def test_a_step_deleted_meanwhile(source, target, monkeypatch):
    """Retention that did not see the hold: said as what it is, not as damage."""
    store = RecordingStore(source.store)
    opened, folder = Run(store), "step-00000300-w1.3"
    get = store.get

    def get_then_delete(key, *, limit_nbytes=None):
        found = get(key, limit_nbytes=limit_nbytes)
        if key == f"{folder}/part-00000-of-00002.json":
            source.store.delete(f"{folder}/COMMIT")
            source.store.delete_folder(folder)
        return found

    monkeypatch.setattr(store, "get", get_then_delete)
    with pytest.raises(NotFoundError, match=r"step 300 \(w1.3\) was deleted while it was copied"):
        copy_steps(opened, target)
    assert target.survey().live == []


def test_retention_leaves_a_step_that_is_copied(source, target):
    """While a step is copied, its source has a hold on it."""
    seen = []

    class Watching(RecordingStore):
        def open_sink(self, key, nbytes=None):
            seen.append({attempt.step for attempt in look(source.store)[0]})
            return super().open_sink(key, nbytes)

    copy_steps(source, Run(Watching(target.store)))
    assert seen
    assert all(held == {300} for held in seen)
    assert look(source.store) == ({}, [])


def test_prune_while_a_step_is_copied(source, target):
    """It leaves the step that is under way alone; what it deletes before its turn is said to be gone."""

    class Pruning(RecordingStore):
        def open_sink(self, key, nbytes=None):
            prune(source, keep_last=1)
            return super().open_sink(key, nbytes)

    assert copy_steps(source, Run(Pruning(target.store)), step=100).ok
    assert sorted(states(source)) == ["step-00000100-w1.1", "step-00000300-w1.3"]
    assert states(target) == {"step-00000100-w1.1": LIVE}
    assert verify(target).ok
    shutil.rmtree(target.url)
    write(source, 400)
    with pytest.raises(NotFoundError, match=r"step 300 \(w1.3\) was deleted while it was copied"):
        copy_steps(source, Run(Pruning(target.store)), every_step=True)
    assert [state.attempt.step for state in target.survey().live] == [100]
    assert copy_steps(source, target, every_step=True).ok


def test_a_source_that_cannot_be_written_to(source, target):
    """Without the right to put a hold there it is copied without one."""
    readonly = FaultyStore(source.store, errno="EROFS", operation="mutating")
    assert copy_steps(Run(readonly), target, every_step=True).ok
    assert tree(target) == tree(source)


def test_two_copies_at_once(source, target, monkeypatch):
    """One that finds its file cut by the other makes no step of it."""
    write(source, 400, rows=FEW)

    class Cutting(RecordingStore):
        def create(self, key, data):
            super().create(key, data)
            if key.endswith("part-00001-of-00002.json"):
                os.truncate(f"{target.url}/step-00000400-w1.4/model-00000-of-00002.safetensors", 5)

    with pytest.raises(StoreError, match="has changed since it was copied"):
        copy_steps(source, Run(Cutting(target.store)))
    assert target.survey().live == []


# -- stopped anywhere -----------------------------------------------------------------------------


def test_stopped_before_every_operation(tmp_path):
    """At each point the copy is readable and has whole steps only, and going on ends with the same bytes."""
    source = Run.open(tmp_path / "source")
    write(source, 100, encoding="zstd")
    write(source, 200, writer=source.open_writer(job="again", world=2, resumed_from=100).number, parity=True)
    expected, log = tree(source), tmp_path / "log"
    copy_steps(source, Run(CrashStore(LocalStore(tmp_path / "whole"), log=log)), every_step=True)
    assert tree(tmp_path / "whole") == expected
    points = log.read_text().splitlines()
    assert len(points) > 40
    for at, point in enumerate(points):
        place = tmp_path / str(at)
        with pytest.raises(Crash):
            copy_steps(source, Run(CrashStore(LocalStore(place), at=at, how="raise")), every_step=True)
        run = Run.open(place)
        for state in run.survey().live:
            assert verify(run, state.attempt.step).ok, point
        assert copy_steps(source, run, every_step=True).ok, point
        assert tree(run) == expected, point


def test_the_source_stopped_at_any_read(source, tmp_path):
    """An error at any operation of the source: the copy is readable, and the next one completes it."""
    recorded = RecordingStore(source.store)
    copy_steps(Run(recorded), tmp_path / "whole")
    count = len(recorded.done)
    for nth in range(1, count + 1):
        place = tmp_path / str(nth)
        with contextlib.suppress(CkptError):
            report = copy_steps(Run(FaultyStore(source.store, errno="EIO", on_nth=nth, operation="*")), place)
            assert json.dumps([problem.what for problem in report.problems])
        run = Run.open(place)
        live = run.survey().live if place.exists() else []
        assert all(verify(run, state.attempt.step).ok for state in live)
        assert copy_steps(source, place).ok
        assert verify(run).ok
        shutil.rmtree(place)
