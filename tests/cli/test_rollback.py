from __future__ import annotations

import json

import pytest

from ckpt.errors import FencedError
from tests.cli.conftest import ckpt, write


def test_rollback(run, capsys):
    """Step 100 becomes the latest, later steps are named, and nothing is deleted."""
    code, out, err = ckpt(capsys, "rollback", run.url, "--to", 100)
    assert (code, err) == (0, "")
    assert "step 100 is the latest now (writer 2)" in out
    assert "no longer live: 200 (w1.2), 300 (w1.3)" in out
    assert [state.attempt.step for state in run.survey().live] == [100]
    assert len(run.attempts()) == 3
    _, out, _ = ckpt(capsys, "ls", run.url, "--all")
    assert "writer 2 (rollback by" in out
    assert "rolled back to step 100" in out


def test_the_old_writer_is_fenced(run, capsys):
    """A job that still writes commits nothing from then on."""
    ckpt(capsys, "rollback", run.url, "--to", 200)
    with pytest.raises(FencedError, match=r"writer 1 has stopped, writer 2 holds the run: rollback by"):
        run.check_not_fenced(1)


def test_json_and_twice(run, capsys):
    """A second rollback to the same step loses nothing more; a step that is not live cannot be gone back to."""
    _, out, _ = ckpt(capsys, "rollback", run.url, "--to", 200, "--json")
    assert json.loads(out) == {
        "run": run.url, "to": 200, "writer": 2, "no_longer_live": [{"step": 300, "attempt": "w1.3"}],
    }  # fmt: skip
    _, out, _ = ckpt(capsys, "rollback", run.url, "--to", 200)
    assert "no longer live: none, it was the latest already" in out
    code, _, err = ckpt(capsys, "rollback", run.url, "--to", 300)
    assert code == 3
    assert "no live step 300; live steps: 100, 200" in err


def test_writing_goes_on(run, capsys):
    """The next writer goes on from the step that was gone back to."""
    ckpt(capsys, "rollback", run.url, "--to", 100)
    run.open_writer(job="next", world=2, resumed_from=100)
    write(run, 200)
    assert [state.attempt.label for state in run.survey().live] == ["w1.1", "w3.1"]
