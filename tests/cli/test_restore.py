from __future__ import annotations

import json

from tests.cli.conftest import ckpt


def test_safetensors(run, tmp_path, capsys):
    """The files that were written are listed with their sizes."""
    code, out, err = ckpt(capsys, "restore", run.url, tmp_path / "out", "--step", 200, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["step"], document["format"], document["dest"]) == (200, "safetensors", str(tmp_path / "out"))
    assert list(document["files"]) == ["model.safetensors", "state.safetensors", "values.json"]
    assert document["files"] == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}


def test_torch(run, tmp_path, capsys):
    """--format torch gives one file for torch.load(weights_only=True)."""
    import torch

    code, out, err = ckpt(capsys, "restore", run.url, tmp_path / "out", "--format", "torch")
    assert (code, err) == (0, "")
    assert f"{tmp_path}/out/step-300.pt" in out
    state = torch.load(tmp_path / "out" / "step-300.pt", weights_only=True)
    assert state["model"]["w"].shape == (64, 32)
    assert state["epoch"] == 300
    assert state["x"][0] is not None


def test_a_full_folder_is_refused(run, tmp_path, capsys):
    """A destination with something in it is exit code 2, and stays as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    code, out, err = ckpt(capsys, "restore", run.url, tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == (f"ckpt: {tmp_path}/out: is not empty (it holds notes); give a new or an empty folder\n")
    assert (tmp_path / "out" / "notes").read_text() == "mine"
