"""Runs that belong to somebody else or to everybody, and destinations in which something lies in wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.cli import main
from ckpt.engine.export import restore
from ckpt.errors import BadInputError
from ckpt.reading.verify import verify
from ckpt.run import Run
from tests.crash.test_other_users import NOBODY, as_user
from tests.security.hostile import Hostile

NAMES = ["../../x", "/tmp/x", "..", "a/../../b", "\u202ex", "con\\..\\x", "x\0y", "\n"]


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_restore_writes_into_its_folder_only(tmp_path: Path, file_format: str):
    """Whatever tensors are called: their names are keys inside of files."""
    hostile = Hostile(tmp_path / "run")
    layout = hostile.layout()
    row = layout["tensors"][1]
    layout["tensors"] = [layout["tensors"][0], row, *({**row, "name": name.replace(".", "%2E")} for name in NAMES)]
    part = hostile.part()
    state = next(file for file in part["files"] if file["group"] == "state")
    old = (hostile.folder / state["name"]).read_bytes()
    grown = old + bytes(8 * len(NAMES))  # the header is for other programs; readers go by the layout
    (hostile.folder / state["name"]).write_bytes(grown)
    state |= {"nbytes": len(grown), "chunks": state["chunks"] * (1 + len(NAMES))}
    hostile.put_layout(layout, files=part["files"])
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    report = restore(hostile.path.as_posix(), tmp_path / "dest" / "inner", 2, file_format)
    made = (
        {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} - before - {"run/holds"}
    )  # a reader holds its step
    assert report.tensors == 2 + len(NAMES)
    assert made == {"dest", "dest/inner", *(f"dest/inner/{name}" for name in report.files)}
    assert set(report.files) <= {"model.safetensors", "state.safetensors", "values.json", "step-2.pt"}


def test_restore_follows_no_link_that_lies_in_wait(tmp_path: Path):
    """A destination that holds anything is refused, so nothing is written through what is there."""
    hostile = Hostile(tmp_path / "run")
    target = tmp_path / "victim"
    target.write_bytes(b"precious")
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "model.safetensors").symlink_to(target)
    with pytest.raises(BadInputError, match="is not empty"):
        restore(str(hostile.path), dest)
    assert target.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_run_of_another_user_is_read_and_not_written(tmp_path: Path):
    """Reading asks for nothing but the right to read; writing is refused by the system, in a sentence."""
    hostile = Hostile(tmp_path / "run")
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/"):
            os.chmod(path, path.stat().st_mode | 0o055)
    url = str(hostile.path)
    assert main(["ls", url]) == 0  # what it imports, somebody else may not be able to read
    assert as_user(NOBODY, lambda: verify(url).problems) == "()"
    assert as_user(NOBODY, lambda: main(["ls", url])) == "0"
    told = as_user(NOBODY, lambda: Run.open(url).open_writer(job="x", world=1, resumed_from=None))
    assert told.startswith("StoreError"), told
    assert "cannot write" in told, told
    assert as_user(NOBODY, lambda: main(["rollback", url, "--to", "1"])) == "8"
    assert [state.attempt.step for state in Run.open(url).survey().live] == [1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_all_may_write_to_is_used_as_it_is(tmp_path: Path):
    """Nothing guards it: somebody else's file is read like ours, somebody else's writer fences us."""
    hostile = Hostile(tmp_path / "run")
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/"):
            os.chmod(path, path.stat().st_mode | 0o055)
    for path in (hostile.path, *hostile.path.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
        os.chmod(path, 0o777 if path.is_dir() else 0o666)
    url = str(hostile.path)
    assert verify(url).problems == ()
    as_user(NOBODY + 1, lambda: Run.open(url).open_writer(job="somebody else", world=1, resumed_from=1))
    assert [state.attempt.step for state in Run.open(url).survey().live] == [1]
