from __future__ import annotations

import json

import numpy as np

from ckpt.keeper.client import KeeperClient
from ckpt.testing.handmade import HandTensor, write_step
from tests.cli.alarmed import FOUND, save_with_alarms
from tests.cli.conftest import ckpt


def test_equal_is_0_and_different_is_1(run, capsys):
    """As with diff(1): 0 for no difference, 1 for some."""
    code, out, _ = ckpt(capsys, "diff", run.url, 100, 100)
    assert code == 0
    assert "0 tensors and 0 values differ; 4 tensors and " in out
    code, out, _ = ckpt(capsys, "diff", run.url, 100, 200)
    assert code == 1
    assert "a: step 100 (w1.1)    b: step 200 (w1.2)" in out
    assert "1 tensor and 1 value differ" in out
    assert [line.split() for line in out.splitlines() if line.startswith("epoch")] == [["epoch", "100", "200"]]


def test_json(run, capsys):
    """What changed, in numbers."""
    code, out, _ = ckpt(capsys, "diff", run.url, 100, 200, "--json")
    document = json.loads(out)
    assert (code, document["equal"]) == (1, False)
    (change,) = document["tensors"]
    assert (change["name"], change["change"], change["changed_elements"]) == ("model.w", "changed", 64 * 32)
    assert document["values"] == [{"path": "epoch", "old": "100", "new": "200"}]


def test_what_is_not_finite_on_either_side(run, capsys):
    """NaN and Inf are counted in columns that are there only when there are any."""
    _, out, _ = ckpt(capsys, "diff", run.url, 100, 200)
    assert "NaN" not in out
    nan, inf = float("nan"), float("inf")
    for step, values in ((400, [nan, nan, 1.0, inf]), (500, [0.0, nan, inf, -inf])):
        data = np.array(values, "<f4").tobytes()
        write_step(
            run,
            step,
            [
                HandTensor("model.w", "float32", (4,), data, "model"),
                HandTensor("x", "uint8", (1,), bytes([step % 256])),
            ],
        )
    _, out, _ = ckpt(capsys, "diff", run.url, 400, 500)
    head, row = (next(line for line in out.splitlines() if line.startswith(word)) for word in ("tensor", "model.w"))
    assert head.split("   ")[-4:] == ["NaN in a", "NaN in b", "Inf in a", "Inf in b"]
    assert row.split()[-4:] == ["2", "1", "1", "2"]
    _, out, _ = ckpt(capsys, "diff", run.url, 400, 500, "--json")
    changes = {change["name"]: change for change in json.loads(out)["tensors"]}
    counts = [
        [changes[name][f"{side}_{what}"] for side in ("old", "new") for what in ("nan", "inf")]
        for name in ("model.w", "x")
    ]
    assert counts == [[2, 1, 1, 2], [0, 0, 0, 0]]


def test_alarms_that_came_and_went(url, capsys, folder):
    """By kind and tensor; they are of how the steps were saved, and do not make equal states different."""
    with KeeperClient.connect(0) as client:
        for step, found in enumerate(((), FOUND, FOUND[:1]), 1):
            save_with_alarms(client, url, step, found)
    _, out, _ = ckpt(capsys, "diff", url, 2, 3)
    head, row = (next(line for line in out.splitlines() if line.startswith(word)) for word in ("alarm", "replicas"))
    assert head.split() == ["alarm", "from", "a", "to", "b", "tensor"]
    assert row.split() == ["replicas", "went", "model.b", "rank", "0"]
    _, out, _ = ckpt(capsys, "diff", url, 1, 2, "--json")
    document = json.loads(out)
    assert document["tensors"] == []
    assert document["alarms"] == [
        {"change": "came", "kind": "not finite", "tensor": "model.a", "detail": "2 NaN, 1 Inf, rank 0"},
        {"change": "came", "kind": "replicas", "tensor": "model.b", "detail": "rank 0"},
    ]
    _, out, _ = ckpt(capsys, "diff", url, 2, 2)
    assert "from a to b" not in out
