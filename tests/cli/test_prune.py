from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import ckpt


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
