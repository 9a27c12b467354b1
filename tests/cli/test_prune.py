from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path

import pytest

from ckpt.format.hold import Hold, encode_hold
from tests.cli.conftest import ckpt, write
from tests.concurrency.interleave import give_metrics


def orphan(run):
    folder = Path(run.url) / "step-00000350-w1.4"
    folder.mkdir()
    (folder / "model-00000-of-00002.safetensors").write_bytes(bytes(1000))
    run.open_writer(job="again", world=2, resumed_from=300)
    return folder


def test_orphans(run, capsys):
    """A dry run removes nothing and says what would go; the real one does it, after the grace period."""
    folder = orphan(run)
    code, out, err = ckpt(capsys, "prune", run.url)
    assert (code, err) == (0, "")
    assert "kept step-00000350-w1.4: without COMMIT, removable in 3600 s (grace 3600 s)" in out
    code, out, _ = ckpt(capsys, "prune", run.url, "--grace-s", 0, "--dry-run")
    assert out.endswith("would remove 1 attempt, 1.00 kB\n")
    assert folder.exists()
    code, out, _ = ckpt(capsys, "prune", run.url, "--grace-s", 0)
    assert (code, folder.exists()) == (0, False)
    assert out.endswith("removed 1 attempt, 1.00 kB\n")


def test_keep_last(run, capsys):
    """--keep-last keeps the newest, after verifying one that stays."""
    code, out, _ = ckpt(capsys, "prune", run.url, "--keep-last", 1, "--json")
    document = json.loads(out)
    assert code == 0
    assert [row["folder"] for row in document["removed"]] == ["step-00000100-w1.1", "step-00000200-w1.2"]
    assert document["removed_nbytes"] == sum(row["nbytes"] for row in document["removed"])
    assert (document["verified_step"], document["dry_run"]) == (300, False)
    assert ckpt(capsys, "verify", run.url)[0] == 0


def test_keep_nothing_is_refused(run, capsys):
    """At least one live step stays."""
    code, _, err = ckpt(capsys, "prune", run.url, "--keep-last", 0)
    assert (code, err) == (2, "ckpt: keep_last=0: at least one live step stays; give 1 or more\n")


def test_all_rules_of_keeping(run, capsys):
    """The multiples and the best stay beside the newest; a dry run says the same, and changes nothing."""
    for step in (400, 500, 600):
        write(run, step)
    for step, loss in ((100, 0.1), (200, 0.3), (300, math.nan), (400, 0.2), (500, 0.1)):
        give_metrics(run, step, **{"val:loss": loss})
    before = sorted(Path(run.url).rglob("*"))
    options = ("--keep-last", 1, "--keep-every", 300, "--keep-best", "val:loss:2:min")
    for dry in (["--dry-run"], []):
        _, out, _ = ckpt(capsys, "prune", run.url, *options, *dry, "--json")
        document = json.loads(out)
        assert [row["step"] for row in document["removed"]] == [200, 400]
        assert (document["verified_step"], document["dry_run"]) == (600, bool(dry))
        if dry:
            assert sorted(Path(run.url).rglob("*")) == before
    assert [state.attempt.step for state in run.survey().live] == [100, 300, 500, 600]
    _, out, _ = ckpt(capsys, "prune", run.url, "--keep-last", 1, "--keep-best", "val:loss:1:max", "--dry-run", "--json")
    assert [row["step"] for row in json.loads(out)["removed"]] == [100, 300]


def test_what_readers_hold_stays(run, capsys):
    """It is said who holds it; the hold of a reader that is gone is removed, and a dry run says so."""
    key = "holds/step-00000200-w1.2.0123456789abcdef.json"
    hold = Hold("ckpt/1", "step-00000200-w1.2", "far", 7, "", time.time() - 20, time.time() - 10)
    run.store.create(key, encode_hold(hold))
    with run.reading(100):
        _, out, _ = ckpt(capsys, "prune", run.url, "--keep-last", 1, "--dry-run")
        assert f"kept step-00000100-w1.1: a reader holds it: pid {os.getpid()} on {socket.gethostname()}, until" in out
        assert f"would remove {key}: the hold of a reader that is gone" in out
        assert out.splitlines()[-1].startswith("would remove 1 attempt")
        assert run.store.exists(key)
        ckpt(capsys, "prune", run.url, "--keep-last", 1)
        assert [state.attempt.step for state in run.survey().live] == [100, 300]
        assert not run.store.exists(key)
    assert run.store.list("holds") == []


def test_rules_that_mean_nothing(run, capsys):
    """--keep-every and --keep-best only add to --keep-last; a best has a count from 1 on."""
    for options in (("--keep-every", 100), ("--keep-best", "loss")):
        code, _, err = ckpt(capsys, "prune", run.url, *options)
        assert (code, "give keep_last too" in err) == (2, True)
    for text in ("", ":2", "loss:0", "loss:0:max"):
        with pytest.raises(SystemExit, match="2"):
            ckpt(capsys, "prune", run.url, "--keep-last", 1, "--keep-best", text)
        assert "expected METRIC" in capsys.readouterr().err
    code, _, err = ckpt(capsys, "prune", run.url, "--keep-last", 1, "--keep-every", 0)
    assert (code, "keep_every=0" in err) == (2, True)
    assert len(run.survey().live) == 3
