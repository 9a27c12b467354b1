"""`ckpt keeper status`, asked of real keepers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.cli.output import seconds_text
from ckpt.format.commit import Attempt
from ckpt.keeper.client import KeeperClient
from ckpt.keeper.settle import keepers, statuses
from ckpt.testing import store_env
from tests.cli.conftest import ckpt
from tests.keeper.conftest import Trainer, is_alive, wait_for
from tests.keeper.rank_process import stage

MIB = 1 << 20


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keepers write no part until the test is over."""
    spec = {
        "wrap": "blocking",
        "program": "keeper",
        "match": "*/part-*",
        "operation": "create",
        "release": tmp_path / "go",
        "waiting": tmp_path / "waiting",
    }
    for name, value in store_env(spec).items():
        monkeypatch.setenv(name, value)
    yield
    (tmp_path / "go").touch()


def status(capsys) -> dict:
    code, out, err = ckpt(capsys, "keeper", "status", "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_no_keeper(folder: Path, capsys):
    """That is no error, and it is said."""
    code, out, err = ckpt(capsys, "keeper", "status")
    assert (code, err) == (0, "")
    assert out.startswith("no keeper is running here")
    assert status(capsys) == {"keepers": [], "silent": []}


def test_a_save_that_is_held_up(trainers: Callable[..., Trainer], url: str, tmp_path: Path, capsys, held):
    """Who is connected, what has been written of what, which memory is taken and allowed: as a table and as JSON."""
    ranks = [trainers(rank) for rank in range(2)]
    for rank in ranks:
        rank.hand_over(7, world=2, nbytes=3 * MIB, budget_bytes=64 * MIB, snapshots=1)
    wait_for(lambda: sum(r.nbytes_written > 3 * MIB for r in statuses()[0].saves[0].ranks) == 2, "both have written")
    wait_for((tmp_path / "waiting").exists, "the storage holds it up")

    document = status(capsys)
    (keeper,) = document["keepers"]
    assert document["silent"] == []
    assert (keeper["pid"], keeper["ends_in_s"]) == (ranks[0].keeper_pid, None)
    assert keeper["job"] == f"CKPT_JOB={os.environ['CKPT_JOB']}"
    assert keeper["clients"] == [{"rank": rank.rank, "pid": rank.pid} for rank in ranks]
    assert keeper["uptime_s"] > 0
    assert Path(keeper["log"]).exists()
    (save,) = keeper["saves"]
    assert (save["run"], save["step"], save["attempt"], save["world"]) == (url, 7, "w1.7", 2)
    assert (save["missing"], save["failure"]) == ([0, 1], "")
    for at, rank in enumerate(save["ranks"]):
        assert (rank["rank"], rank["state"], rank["nbytes_written"]) == (at, "writing", rank["nbytes"])
    assert [(a["run"], a["rank"], a["nbytes"], a["state"]) for a in keeper["arenas"]] == [
        (url, rank, 4 * MIB, "staged") for rank in range(2)
    ]
    assert keeper["runs"] == [{"run": url, "nbytes": 8 * MIB, "snapshots": 1, "budget_bytes": 64 * MIB}]
    assert keeper["available_nbytes"] > 0
    assert keeper["available_by"]

    code, out, err = ckpt(capsys, "keeper", "status")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:3] == ["keeper", f"{keeper['pid']},", "up"]
    assert f"ranks    rank 0 (pid {ranks[0].pid}), rank 1 (pid {ranks[1].pid})" in out
    assert f"memory   8.39 MB for {url} (1 snapshot a rank, budget 67.1 MB)" in out
    assert ["7", "w1.7", url, "1", "writing", "3.15", "MB", "of", "3.15", "MB"] in lines
    assert "step 7 (w1.7) waits for ranks 0-1 of 2" in out
    assert [str(keeper["arenas"][0]["arena"]), url, "0", "4.19", "MB", "staged"] in lines
    assert f"log      {keeper['log']}" in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_a_keeper_that_lingers(folder: Path, url: str, capsys, monkeypatch: pytest.MonkeyPatch):
    """After a crash it says how long it waits for the job to come back."""
    monkeypatch.setenv("CKPT_LINGER_S", "3600")
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1).wait(30)
        pid = client.keeper_pid
        client.close(done=False)
    wait_for(lambda: status(capsys)["keepers"][0]["clients"] == [], "the rank has left")
    assert 3500 < status(capsys)["keepers"][0]["ends_in_s"] <= 3600
    out = ckpt(capsys, "keeper", "status")[1]
    assert "ranks    none is connected; ends in 60 min unless one comes back" in out
    os.kill(pid, signal.SIGTERM)


def test_a_save_that_goes_on_alone(folder: Path, url: str, capsys):
    """A keeper whose trainer has gone ends when the save under way is over; its failure is told meanwhile."""
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1, world=2).wait_staged(30)
        client.close(done=True)
        wait_for(lambda: status(capsys)["keepers"][0]["clients"] == [], "the rank has left")
        wait_for(lambda: statuses()[0].saves[0].ranks[0].state == "durable", "its part is durable")
        out = ckpt(capsys, "keeper", "status")[1]
        assert "ranks    none is connected; ends when 1 save is done" in out
        assert "step 1 (w1.1) waits for rank 1 of 2" in out
        with KeeperClient.connect(1) as other:
            other.abandon(url, Attempt(1, 1, 1), 1, 2, "gave up")
    wait_for(lambda: keepers() == [], "the keeper is gone")


def test_a_keeper_that_does_not_answer(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """One that was stopped is named, with its log, and not taken for none."""
    monkeypatch.setattr("ckpt.keeper.start.ATTACH_TIMEOUT_S", 0.3)
    with KeeperClient.connect(0) as client:
        os.kill(client.keeper_pid, signal.SIGSTOP)
        try:
            document = status(capsys)
            out = ckpt(capsys, "keeper", "status")[1]
        finally:
            os.kill(client.keeper_pid, signal.SIGCONT)
        log = next(folder.glob("*.log"))
        assert document == {"keepers": [], "silent": [{"pid": client.keeper_pid, "log": str(log)}]}
        assert f"keeper {client.keeper_pid} lives and does not answer" in out
        assert is_alive(client.keeper_pid)


def test_two_jobs(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Each job of a node has a keeper of its own, and all are shown."""
    with KeeperClient.connect(0) as one:
        monkeypatch.setenv("CKPT_JOB", "another")
        with KeeperClient.connect(0) as other:
            assert {k["pid"] for k in status(capsys)["keepers"]} == {one.keeper_pid, other.keeper_pid}
            assert ckpt(capsys, "keeper", "status")[1].count("keeper   ") == 2


def test_it_does_not_import_torch(folder: Path):
    """Torch is not even importable here."""
    code = "import sys; sys.modules['torch'] = None; from ckpt.cli import main; sys.exit(main(sys.argv[1:]))"
    for options in ([], ["--json"]):
        words = [sys.executable, "-c", code, "keeper", "status", *options]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["keeper"], ["keeper", "stop"], ["keeper", "status", "run"]])
def test_a_wrong_command_line(words: list[str], capsys):
    """Exit code 2 and one sentence."""
    with pytest.raises(SystemExit) as caught:
        ckpt(capsys, *words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_durations_in_words():
    """Two digits that matter."""
    assert [seconds_text(s) for s in (0, 59.6, 99, 100, 3600, 5971, 18_720)] == [
        "0 s", "60 s", "99 s", "2 min", "60 min", "1.7 h", "5.2 h",
    ]  # fmt: skip
