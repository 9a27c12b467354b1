"""A repair that dies at any of its operations leaves the step at least as repairable as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt
from ckpt.engine.repair import repair
from ckpt.format.commit import COMMIT
from ckpt.run import Run
from ckpt.store import LocalStore
from ckpt.testing.crashing import Crash, CrashStore
from tests.damage.battery import same_files
from tests.damage.kinds import Damage, Kind, holds, inflict, prepare, target

FOLDER = "step-00000002-w2.1"
DAMAGES = [
    Damage("flip 5000", f"{FOLDER}/model-00000-of-00002.safetensors"),
    Damage("delete", f"{FOLDER}/optimizer-00001-of-00002.safetensors"),
    Damage("flip 100", f"{FOLDER}/parity-00000-of-00002.xor"),
    Damage("empty", f"{FOLDER}/parity-00000-of-00002.json"),
    Damage("flip 30", f"{FOLDER}/part-00001-of-00002.json"),
    Damage("cut 3", f"{FOLDER}/{COMMIT}"),
    Damage("flip 9", "layout"),
    Damage("flip 0", "writers/000002.json"),
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("stopped") / "pristine"
    prepare(root, Kind(2, "raw", parity=True))
    assert ckpt.verify(root).ok
    return root


def damaged(pristine: Path, root: Path, damage: Damage) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pristine, root)
    inflict(root, damage)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.key.rpartition("/")[2])
def test_stopped_anywhere(quick, tmp_path, record_property, pristine, damage):
    """Before and after every operation: the next repair ends whole, with no more to take from than the first had."""
    commit = Run.open(pristine).find(2).commit
    assert commit is not None
    if damage.key == "layout":
        damage = damage._replace(key=f"layouts/{commit.layouts[0].digest}.json")
    within = damage.key.rpartition("/")[2].startswith(("model", "optimizer", "parity"))
    sources = [] if within else [pristine]
    work = tmp_path / "work"
    points = 0
    for after in (False, True):
        for at in range(1000):
            damaged(pristine, work, damage)
            store = CrashStore(LocalStore(work), at=at, after=after, how="raise", match="[!h]*")
            try:
                repair(Run(store), step=2, sources=sources)
            except Crash:
                points += 1
            else:
                break
            copies = [path for path in work.rglob("repaired-*") if path.is_file()]
            # What is gone under its name is whole in the copy: then nothing else is needed any more.
            needs = sources if (work / damage.key).exists() or not copies else []
            report = repair(work, step=2, sources=needs)
            assert report.ok, (at, after, report)
            assert same_files(pristine, without_holds(work)), (at, after)
        assert at > 0
    record_property("told", f"repair stopped at {points} of {points} points ({damage.what} of {damage.key})")


def without_holds(root: Path) -> Path:
    """The run without what a dead reader has left of its hold."""
    for path in (root / "holds").glob("*"):
        path.unlink()
    return root


def test_a_load_between(quick, tmp_path, pristine):
    """While the only whole bytes are those of the copy, a load takes them from there."""
    work = tmp_path / "work"
    shutil.copytree(pristine, work)
    for name in ("model-00000-of-00002.safetensors", "part-00000-of-00002.json"):
        path = work / FOLDER / name
        path.rename(path.with_name(f"repaired-{name}"))
    (work / FOLDER / "parity-00000-of-00002.xor").unlink()
    state = target()
    report = ckpt.load(work, state)
    assert holds(state) == report.step == 2
    assert {text.rpartition("from ")[2] for text in report.repaired} == {
        "repaired-model-00000-of-00002.safetensors",
        "repaired-part-00000-of-00002.json",
    }


def test_a_damaged_copy(quick, tmp_path, pristine):
    """A copy that is no longer whole either still gives what is right in it; both are gone afterwards."""
    work = tmp_path / "work"
    shutil.copytree(pristine, work)
    path = work / FOLDER / "model-00000-of-00002.safetensors"
    (work / FOLDER / "parity-00000-of-00002.xor").unlink()
    copy = path.with_name(f"repaired-{path.name}")
    shutil.copy(path, copy)
    for file, at in ((path, -1), (copy, 4100)):
        raw = bytearray(file.read_bytes())
        raw[at] ^= 1
        file.write_bytes(raw)
    assert repair(work, step=2).ok
    assert same_files(pristine, work)
