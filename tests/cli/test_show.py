from __future__ import annotations

import json
from pathlib import Path

from ckpt.keeper.client import KeeperClient
from ckpt.run import Run
from tests.cli.alarmed import FOUND, save_with_alarms
from tests.cli.conftest import ckpt


def shown(capsys, run, *options):
    code, out, err = ckpt(capsys, "show", run.url, *options, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_everything(run, capsys):
    """COMMIT's facts, layouts, tensors, values and files of the latest step."""
    document = shown(capsys, run)
    assert (document["step"], document["attempt"], document["world"], document["format"]) == (300, "w1.3", 2, "ckpt/1")
    assert document["writer"]["number"] == 1
    assert [layout["ranks"] for layout in document["layouts"]] == [[[0, 1]]]
    tensors = {(t["name"], t["rank"]): t for t in document["tensors"]}
    assert tensors["model.w", None] == {
        "name": "model.w", "group": "model", "dtype": "float32", "shape": [64, 32], "kind": "tensor", "nbytes": 8192,
        "mesh": [2], "placements": ["S0"], "rank": None,
    }  # fmt: skip
    assert ("rng", 1) in tensors
    assert document["values"] == {"model": {"module": "model"}, "epoch": 300, "x": ["<tensor model.b>"]}
    assert document["rank_values"] == [{"seed": 0}, {"seed": 1}]
    commit = run.read_commit(run.attempts()[-1])
    sizes = {file["name"]: file["nbytes"] for file in document["files"]}
    assert sizes[commit.parts[1].name] == commit.parts[1].nbytes
    for name, nbytes in sizes.items():
        assert run.store.size(run.key(run.attempts()[-1], name)) == nbytes


def test_sections_and_patterns(run, capsys):
    """An option shows its section only, and a pattern filters it."""
    document = shown(capsys, run, "--step", 100, "--tensors", "*.w")
    assert [t["name"] for t in document["tensors"]] == ["model.w"]
    assert {"values", "files"}.isdisjoint(document)
    document = shown(capsys, run, "--values", "ep*")
    assert document["values"] == {"epoch": 300}
    assert "tensors" not in document
    document = shown(capsys, run, "--files")
    assert {"values", "tensors"}.isdisjoint(document)
    _, out, _ = ckpt(capsys, "show", run.url, "--values")
    assert out.splitlines() == [
        "values",
        "├── epoch: 300",
        "├── model",
        "│   └── module: 'model'",
        "├── x: ['<tensor model.b>']",
        "├── rank 0",
        "│   └── seed: 0",
        "└── rank 1",
        "    └── seed: 1",
    ]


def test_text(run, capsys):
    """The text has a line for each tensor and file."""
    _, out, _ = ckpt(capsys, "show", run.url, "--step", 200)
    assert "step     200 (w1.2), 2 ranks" in out
    assert "3 tensors" not in out
    assert "4 tensors, 8.22 kB" in out
    assert "model-00001-of-00002.safetensors" in out


def test_alarms(url, capsys, folder):
    """Which tensors looked wrong, in a section of its own; a step without any says nothing of it."""
    with KeeperClient.connect(0) as client:
        save_with_alarms(client, url, 1, [])
        save_with_alarms(client, url, 2, FOUND)
    code, out, _ = ckpt(capsys, "show", url, "--step", 1)
    assert (code, "alarm " in out) == (0, False)
    _, out, _ = ckpt(capsys, "show", url)
    rows = [line.split("  ") for line in out.splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows if row[0] in {"not finite", "replicas"}] == [
        ["not finite", "model.a", "2", "1", "rank 0"],
        ["replicas", "model.b", "rank 0"],
    ]
    assert "\n2 alarms\n" in out
    assert "features alarms" in out
    _, out, _ = ckpt(capsys, "show", url, "--step", 1, "--alarms")
    assert out == "0 alarms\n"
    opened = Run.open(url)
    document = shown(capsys, opened, "--alarms")
    assert document["alarms"] == [
        {"kind": "not finite", "tensor": "model.a", "nan": 2, "inf": 1, "ranks": [[0, 0]]},
        {"kind": "replicas", "tensor": "model.b", "nan": 0, "inf": 0, "ranks": [[0, 0]]},
    ]
    assert "tensors" not in document
    assert shown(capsys, opened, "--step", 1)["alarms"] == []
    path = Path(url, "step-00000002-w1.2", "alarms.json")
    path.write_bytes(path.read_bytes().replace(b"model.a", b"model.c"))
    code, _, err = ckpt(capsys, "show", url)
    assert code == 4
    assert "alarms.json" in err
    code, out, _ = ckpt(capsys, "ls", url)
    assert code == 0
    assert ckpt(capsys, "verify", url)[0] == 4
