from __future__ import annotations

import json
import math
import re
import socket
from pathlib import Path

from ckpt.format.commit import COMMIT
from ckpt.keeper.client import KeeperClient
from ckpt.run import Run
from tests.cli.alarmed import FOUND, save_with_alarms
from tests.cli.conftest import ckpt, write
from tests.concurrency.interleave import give_metrics


def listed(capsys, run, *options):
    code, out, err = ckpt(capsys, "ls", run.url, *options, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_live_steps(run, capsys):
    """Each live step has its attempt, ranks, bytes, time and host; the newest is marked."""
    document = listed(capsys, run)
    assert (document["run"], document["latest"], document["not_live"]) == (run.url, 300, 0)
    assert [(row["step"], row["attempt"], row["latest"]) for row in document["steps"]] == [
        (100, "w1.1", False),
        (200, "w1.2", False),
        (300, "w1.3", True),
    ]
    newest = document["steps"][-1]
    assert newest["tensor_nbytes"] == 64 * 32 * 4 + 14
    assert (newest["world"], newest["state"], newest["writer"]) == (2, "live", 1)
    assert (newest["job"], newest["host"]) == ("by hand", socket.gethostname())
    assert newest["created_unix_s"] == run.read_commit(run.attempts()[-1]).created_unix_s


def test_text(run, capsys):
    """The table has a line for each step, and the newest says so."""
    _, out, _ = ckpt(capsys, "ls", run.url)
    lines = out.splitlines()
    assert lines[0].split() == ["step", "attempt", "state", "ranks", "tensors", "written", "host"]
    assert lines[2].split()[:6] == ["100", "w1.1", "live", "2", "8.21", "kB"]
    assert lines[4].split()[:4] == ["300", "w1.3", "live,", "latest"]


def test_which_300_is_live_and_why(run, capsys):
    """After damage to 300 the job went on from 200: the new 300 is live, the old one abandoned, and ls says why."""
    run.open_writer(job="job 7", world=2, resumed_from=200)
    write(run, 300)
    _, out, _ = ckpt(capsys, "ls", run.url)
    assert "live, latest" in next(line for line in out.splitlines() if "w2.1" in line)
    assert "instead of w1.3" in out
    assert (
        f"not live: step 300 (w1.3) is abandoned: writer 2 (job 7 on {socket.gethostname()}) went on from step 200"
        in out
    )
    rows = {row["attempt"]: row for row in listed(capsys, run, "--all")["steps"]}
    assert {attempt: row["state"] for attempt, row in rows.items()} == {
        "w1.1": "live", "w1.2": "live", "w1.3": "abandoned", "w2.1": "live",
    }  # fmt: skip
    assert [row["attempt"] for row in listed(capsys, run)["steps"]] == ["w1.1", "w1.2", "w2.1"]


def test_torn_and_unfinished(run, capsys):
    """A torn COMMIT and an attempt without one are not steps; both are said aloud with their reason."""
    (Path(run.url) / "step-00000300-w1.3" / COMMIT).write_bytes(b"{")
    (Path(run.url) / "step-00000400-w1.4").mkdir()
    (Path(run.url) / "step-00000400-w1.4" / "model-00000-of-00002.safetensors").write_bytes(b"half")
    document = listed(capsys, Run.open(run.url), "--all")
    assert document["latest"] == 200
    states = {row["step"]: (row["state"], row["world"], row["tensor_nbytes"]) for row in document["steps"]}
    assert states[300] == ("damaged", None, None)
    assert states[400] == ("incomplete", None, None)
    _, out, _ = ckpt(capsys, "ls", run.url)
    assert "not live: step 300 (w1.3) is damaged" in out
    assert "not live: step 400 (w1.4) is incomplete: no COMMIT" in out


def test_many_others_are_counted(run, capsys):
    """Attempts that nobody looks for are one line."""
    run.open_writer(job="again", world=2, resumed_from=None)
    write(run, 10)
    write(run, 10)
    _, out, _ = ckpt(capsys, "ls", run.url)
    assert out.count("not live: step") == 4
    write(run, 400)
    _, out, _ = ckpt(capsys, "ls", run.url)
    assert out.count("not live: step") == 1
    assert out.endswith("3 more attempts not live: `ckpt ls --all` shows them\n")


def test_a_run_without_steps(tmp_path, capsys):
    """A run that was only opened is a run."""
    run = Run.open(tmp_path / "run")
    run.open_writer(job="job", world=1, resumed_from=None)
    assert ckpt(capsys, "ls", run.url) == (0, f"{run.url}: no live step yet\n", "")
    assert listed(capsys, run) == {"run": run.url, "latest": None, "steps": [], "not_live": 0}


def test_a_damaged_layout_does_not_hide_the_step(run, capsys):
    """Ls needs the layout for one number only; verify says what is wrong."""
    for path in (Path(run.url) / "layouts").iterdir():
        path.write_bytes(b"")
    assert [row["tensor_nbytes"] for row in listed(capsys, run)["steps"]] == [None, None, None]


def test_a_step_with_alarms_is_marked(url, capsys, folder):
    """In a column that is there only when some step has any; ``?`` where the record is damaged."""
    with KeeperClient.connect(0) as client:
        save_with_alarms(client, url, 1, [])
        _, out, _ = ckpt(capsys, "ls", url)
        assert "alarms" not in out
        save_with_alarms(client, url, 2, [])
        save_with_alarms(client, url, 3, FOUND)
        save_with_alarms(client, url, 4, [], float("nan"))
    _, out, _ = ckpt(capsys, "ls", url, "--json")
    assert [row["alarms"] for row in json.loads(out)["steps"]] == [[], [], ["not finite", "replicas"], ["not finite"]]
    path = Path(url, "step-00000004-w1.4", "alarms.json")
    path.write_bytes(path.read_bytes()[:-1])
    _, out, _ = ckpt(capsys, "ls", url)
    lines = out.splitlines()
    assert lines[0].split()[-1] == "alarms"
    assert [line.split("  ")[-1].strip() for line in lines[2:6]][2:] == ["not finite, replicas", "?"]
    _, out, _ = ckpt(capsys, "ls", url, "--json")
    assert json.loads(out)["steps"][3]["alarms"] is None


def test_metrics_are_columns(run, capsys):
    """As many as fit, under names that fit; all of them as JSON, NaN and the infinities as text."""
    give_metrics(run, 100, loss=1.23456789, acc=math.nan)
    give_metrics(run, 300, loss=-math.inf, **{"a very long name of a metric": 1e-9, "x": 1.0, "y": 2.0, "z": 3.0})
    _, out, _ = ckpt(capsys, "ls", run.url)
    lines = out.splitlines()
    assert re.split("  +", lines[0])[5:9] == ["a very long nam…", "acc", "loss", "x"]
    assert ("1.235" in lines[2], "nan" in lines[2], "-inf" in lines[4], "1e-09" in lines[4]) == (True,) * 4
    assert lines[5] == "2 more metrics: `ckpt ls --json` has all"
    assert [row["metrics"] for row in listed(capsys, run)["steps"]] == [
        {"acc": "nan", "loss": 1.23456789},
        {},
        {"a very long name of a metric": 1e-9, "loss": "-inf", "x": 1.0, "y": 2.0, "z": 3.0},
    ]
    _, out, _ = ckpt(capsys, "show", run.url, "--step", 100)
    assert "metrics  acc nan, loss 1.23457" in out
    _, out, _ = ckpt(capsys, "show", run.url, "--step", 100, "--json")
    assert json.loads(out)["metrics"] == {"acc": "nan", "loss": 1.23456789}


def test_damaged_metrics(run, capsys):
    """The steps are listed all the same, and verify names the file."""
    give_metrics(run, 300, loss=1.0)
    (Path(run.url) / "step-00000300-w1.3" / "metrics.json").write_bytes(b"{}")
    _, out, _ = ckpt(capsys, "ls", run.url)
    assert "live, latest" in out
    assert listed(capsys, run)["steps"][-1]["metrics"] is None
    code, out, _ = ckpt(capsys, "verify", run.url)
    assert (code, "step-00000300-w1.3/metrics.json" in out) == (4, True)
    assert "metrics  damaged" in ckpt(capsys, "show", run.url)[1]
