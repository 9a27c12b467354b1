from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckpt.run import Run
from tests.cli.conftest import ckpt, write
from tests.damage.kinds import Kind, prepare


@pytest.fixture
def parity_run(tmp_path):
    prepare(tmp_path / "run", Kind(2, "raw", parity=True))
    return tmp_path / "run"


def model(root: Path, step: int = 2) -> Path:
    (path,) = root.glob(f"step-{step:08}-*/model-00000-*")
    return path


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_from_parity(parity_run, capsys):
    """Said file by file; afterwards there is nothing to do."""
    path = model(parity_run)
    before = path.read_bytes()
    flip(path)
    key = path.relative_to(parity_run)
    code, out, err = ckpt(capsys, "repair", parity_run, "--dry-run")
    assert (code, err) == (0, "")
    assert (
        f"step 2 (w2.1): 1 file could be repaired, every byte would be right\n  could be repaired: {key}: from " in out
    )
    assert path.read_bytes() != before
    code, out, err = ckpt(capsys, "repair", parity_run)
    assert (code, err) == (0, "")
    assert out == (
        f"step 2 (w2.1): 1 file repaired, every byte is right\n  repaired: {key}: from parity-00000-of-00002.xor\n"
    )
    assert path.read_bytes() == before
    assert ckpt(capsys, "repair", parity_run)[:2] == (0, "step 2 (w2.1): nothing to repair, every byte is right\n")


def test_what_is_left(run, capsys, tmp_path):
    """Exit code 4, with each problem; a copy of the run helps."""
    shutil.copytree(run.url, tmp_path / "copy")
    flip(model(Path(run.url), 300))
    code, out, err = ckpt(capsys, "repair", run.url)
    assert (code, err) == (4, "")
    assert out.startswith(
        "step 300 (w1.3): 1 problem, and nothing to repair it from\n  left: step-00000300-w1.3/model-"
    )
    assert ckpt(capsys, "repair", run.url, "--dry-run")[0] == 4
    code, out, err = ckpt(capsys, "repair", run.url, "--from", tmp_path / "nothing", "--from", tmp_path / "copy")
    assert code == 0
    assert f"from {tmp_path / 'copy'}\n" in out


def test_all_steps(run, capsys, tmp_path):
    """Every committed step, oldest first; what was never one is not made one."""
    shutil.copytree(run.url, tmp_path / "copy")
    for step in (100, 300):
        flip(model(Path(run.url), step))
    write_uncommitted = Path(run.url) / "step-00000400-w1.4"
    write_uncommitted.mkdir()
    code, out, _ = ckpt(capsys, "repair", run.url, "--all", "--from", tmp_path / "copy", "--json")
    document = json.loads(out)
    assert (code, document["ok"], document["dry_run"], document["writers"]) == (0, True, False, [])
    assert [(step["step"], len(step["repaired"]), step["left"]) for step in document["steps"]] == [
        (100, 1, []), (200, 0, []), (300, 1, []),
    ]  # fmt: skip
    repaired = document["steps"][0]["repaired"][0]
    assert repaired["source"] == str(tmp_path / "copy")


def test_a_lost_commit_comes_last(run, capsys, tmp_path):
    """It is not put back over files that are not whole."""
    shutil.copytree(run.url, tmp_path / "copy")
    (commit,) = Path(run.url).glob("step-00000300-*/COMMIT")
    flip(commit, 5)
    for root in (Path(run.url), tmp_path / "copy"):
        flip(model(root, 300))
    code, out, _ = ckpt(capsys, "repair", run.url, "--step", 300, "--from", tmp_path / "copy")
    assert code == 4
    assert "COMMIT: damaged or missing, and not put back while other files of the step are damaged" in out
    flip(model(tmp_path / "copy", 300))
    code, out, _ = ckpt(capsys, "repair", run.url, "--step", 300, "--from", tmp_path / "copy")
    assert code == 0, out
    assert Run.open(run.url).find(300).commit is not None


def test_a_step_only_the_copy_has(run, capsys, tmp_path):
    """Asked for by its number it comes back; else it is no damage."""
    shutil.copytree(run.url, tmp_path / "copy")
    shutil.rmtree(next(Path(run.url).glob("step-00000300-*")))
    assert ckpt(capsys, "repair", run.url, "--all", "--from", tmp_path / "copy")[1].count("step ") == 2
    assert ckpt(capsys, "repair", run.url, "--from", tmp_path / "copy")[1].startswith("step 200 ")
    assert ckpt(capsys, "repair", run.url, "--step", 300, "--from", tmp_path / "copy")[0] == 0
    assert ckpt(capsys, "verify", run.url, "--step", 300)[0] == 0


def test_a_folder_in_the_way(parity_run, capsys):
    """A folder that is not empty is somebody's; it is left, and so is the damage."""
    path = model(parity_run)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    code, out, _ = ckpt(capsys, "repair", parity_run)
    assert code == 4
    assert "a folder with files stands there; move it away" in out
    (path / "notes.txt").unlink()
    assert ckpt(capsys, "repair", parity_run)[0] == 0


def test_what_is_refused(run, capsys, tmp_path):
    """No run, no such step, and options that exclude each other."""
    assert ckpt(capsys, "repair", tmp_path / "none")[0] == 3
    assert ckpt(capsys, "repair", run.url, "--step", 7)[0] == 3
    code, _, err = ckpt(capsys, "repair", run.url, "--step", 100, "--all")
    assert (code, "exclude each other" in err) == (2, True)
    write(run, 400)
    assert ckpt(capsys, "repair", run.url)[0] == 0
