from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ckpt


def test_the_latest_step(run, tmp_path, capsys):
    """One line says what went over; again, that it is there; the copy verifies."""
    code, out, err = ckpt(capsys, "copy", run.url, tmp_path / "copy")
    assert (code, err) == (0, "")
    assert out.startswith("step 300 (w1.3): 6 files, ")
    assert " copied in " in out
    code, out, _ = ckpt(capsys, "copy", run.url, tmp_path / "copy")
    assert (code, out) == (0, "step 300 (w1.3): already there\n")
    assert ckpt(capsys, "verify", tmp_path / "copy", "--all")[0] == 0


def test_all_steps_as_json(run, tmp_path, capsys):
    """The document has a row for each step, and what the target had already."""
    ckpt(capsys, "copy", run.url, tmp_path / "copy", "--step", 100)
    os.remove(tmp_path / "copy" / "step-00000100-w1.1" / "COMMIT")
    code, out, _ = ckpt(capsys, "copy", run.url, tmp_path / "copy", "--all", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["ok"]
    assert (document["run"], document["target"]) == (run.url, str(tmp_path / "copy"))
    assert [(row["step"], row["outcome"]) for row in document["steps"]] == [
        (100, "copied"), (200, "copied"), (300, "copied"),
    ]  # fmt: skip
    first = document["steps"][0]
    assert (first["files"], first["nbytes"], first["skipped_files"]) == (0, 0, 6)
    assert document["writers"] == 0
    _, out, _ = ckpt(capsys, "copy", run.url, tmp_path / "other", "--all")
    assert out.splitlines()[-1].startswith("3 of 3 steps copied, ")


def test_damage(run, tmp_path, capsys):
    """Exit code 4; the chunk is named, and the copy has no such step."""
    path = Path(run.url, "step-00000300-w1.3", "model-00001-of-00002.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    code, out, _ = ckpt(capsys, "copy", run.url, tmp_path / "copy", "--all")
    assert code == 4
    assert "step 300 (w1.3): damaged, so it was not made there; `ckpt repair` may help" in out
    assert "step-00000300-w1.3/model-00001-of-00002.safetensors: model.w[32:64,0:32]: chunk 0: digest" in out
    assert [row["step"] for row in json.loads(ckpt(capsys, "ls", tmp_path / "copy", "--json")[1])["steps"]] == [
        100,
        200,
    ]


def test_what_is_refused(run, tmp_path, capsys):
    """Exit code and one sentence: another run, no run, no such step, both options."""
    assert ckpt(capsys, "copy", run.url, run.url)[::2] == (
        2,
        f"ckpt: {run.url}: source and target are the same place\n",
    )
    assert ckpt(capsys, "copy", tmp_path / "absent", tmp_path / "copy")[0] == 3
    assert ckpt(capsys, "copy", run.url, tmp_path / "copy", "--step", 7)[0] == 3
    with pytest.raises(SystemExit) as caught:
        ckpt(capsys, "copy", run.url, tmp_path / "copy", "--step", 7, "--all")
    assert caught.value.code == 2


def test_it_does_without_torch(run, tmp_path):
    """As the other light verbs; nor is fsspec loaded for paths."""
    code = (
        "import sys; from ckpt.cli import main; main(sys.argv[1:]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'fsspec')))"
    )
    done = subprocess.run([sys.executable, "-c", code, "copy", run.url, str(tmp_path / "copy")], check=False)
    assert done.returncode == 0
