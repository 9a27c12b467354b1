from __future__ import annotations

import json

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
