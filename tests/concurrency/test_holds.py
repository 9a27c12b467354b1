"""Holds: what is one, when it is void, and what the clocks and deaths of readers and deleters do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ckpt import holds
from ckpt.engine.retention import prune
from ckpt.errors import BadInputError, DamagedError
from ckpt.format import records
from ckpt.format.commit import Attempt
from ckpt.format.hold import HOLDS, MAX_HOLD_S, Hold, decode_hold, encode_hold, hold_key, parse_hold_name
from ckpt.run import Run
from ckpt.store import LocalStore
from ckpt.testing import FaultyStore
from tests.concurrency.interleave import folders, retain, save
from tests.keeper.conftest import ROOT, wait_for

ATTEMPT = Attempt(1, 1, 1)
YEARS_S = 10 * 365 * 86_400.0


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Steps 1 to 3."""
    save(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


def names(url: Path) -> list[str]:
    return sorted(path.name for path in (url / HOLDS).iterdir())


def someone(url: Path, **fields: object) -> str:
    """The hold of a reader on another host; its key."""
    now = time.time()
    hold = Hold(records.FORMAT, ATTEMPT.folder, "elsewhere", 1, "", now, now + 100)
    key = hold_key(ATTEMPT.folder, "0123456789abcdef")
    Run.open(url).store.create(key, records.encode(msgspec.structs.replace(hold, **fields)))
    return key


def test_the_record(url: Path) -> None:
    """Who, where, what and until when; gone when the reader is done, also by an error."""
    with pytest.raises(KeyError), Run.open(url).reading(1):
        (name,) = names(url)
        assert parse_hold_name(name) == ATTEMPT
        hold = decode_hold((url / HOLDS / name).read_bytes(), name)
        assert (hold.folder, hold.pid) == (ATTEMPT.folder, os.getpid())
        assert hold.process == f"{holds.where_pids_count()}.{holds.process_identity(os.getpid())}"
        assert hold.until_unix_s - hold.created_unix_s == holds.HOLD_S
        assert "pid" in holds.describe(hold)
        raise KeyError
    assert names(url) == []


@pytest.mark.parametrize(
    "name", ["step-00000001-w1.1.json", "step-1-w1.1.0123456789abcdef.json", "x", "step-00000001-w1.1.0123.json"]
)
def test_other_names_are_no_holds(url: Path, name: str) -> None:
    """Whatever lies in the folder."""
    assert parse_hold_name(name) is None
    (url / HOLDS).mkdir()
    (url / HOLDS / name).write_text("{}")
    retain(Run.open(url))
    assert folders(url) == ["step-00000003-w1.3"]
    assert names(url) == [name]


@pytest.mark.parametrize(
    "fields",
    [{"folder": "../x"}, {"until_unix_s": 0.0}, {"until_unix_s": 1e11}, {"pid": -1}, {"host": "x" * 5000}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_hold_that_nobody_wrote_is_void(url: Path, fields: dict[str, object]) -> None:
    """It cannot be written, and in the folder it keeps nothing for ever."""
    now = time.time()
    good = Hold(records.FORMAT, ATTEMPT.folder, "h", 1, "", now, now + MAX_HOLD_S)
    assert decode_hold(encode_hold(good), "here") == good
    bad = msgspec.structs.replace(good, **fields)
    with pytest.raises(BadInputError):
        encode_hold(bad)
    with pytest.raises(DamagedError):
        decode_hold(records.encode(bad), "here")
    key = someone(url, **fields)
    assert holds.look(Run.open(url).store) == ({}, [key])
    retain(Run.open(url))
    assert folders(url) == ["step-00000003-w1.3"]


def test_a_hold_of_a_later_version_counts(url: Path) -> None:
    """What it says is not known, so the step stays."""
    someone(url, format="ckpt/2")
    retain(Run.open(url))
    assert folders(url) == ["step-00000001-w1.1", "step-00000003-w1.3"]


def test_the_hold_of_another_host_counts_until_it_expires(url: Path) -> None:
    """Nobody here can tell whether that reader lives."""
    key = someone(url)
    run = Run.open(url)
    assert list(run.held()) == [ATTEMPT]
    assert holds.look(run.store, time.time() + 99)[1] == []
    assert holds.look(run.store, time.time() + 101) == ({}, [key])


def test_the_hold_of_a_process_that_is_gone_is_void(url: Path) -> None:
    """Killed, on this host; one with its pid that was started at another time is not that one."""
    code = f"from ckpt.run import Run\nwith Run.open({str(url)!r}).reading(1):\n    print(1, flush=True)\n    input()"
    reader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert reader.stdout is not None
    assert reader.stdin is not None
    assert reader.stdout.readline() == "1\n"
    run = Run.open(url)
    assert run.held()[ATTEMPT].pid == reader.pid
    retain(run)
    assert folders(url) == ["step-00000001-w1.1", "step-00000003-w1.3"]
    os.kill(reader.pid, signal.SIGKILL)
    reader.wait()
    reader.stdin.close()
    reader.stdout.close()
    assert run.held() == {}
    report = prune(url, keep_last=1, dry_run=True)
    assert [r.folder for r in report.removed] == ["step-00000001-w1.1"]
    assert report.removed_holds == tuple(f"{HOLDS}/{name}" for name in names(url))
    assert len(names(url)) == 1
    prune(url, keep_last=1)
    assert (names(url), folders(url)) == ([], ["step-00000003-w1.3"])


def test_pids_of_other_namespaces_are_not_looked_for(url: Path) -> None:
    """A container on this host, or another boot: its pids say nothing here."""
    place = holds.where_pids_count()
    for other in (f"{place}0.4194304.1", "other-boot.1.4194304.1", ""):
        key = someone(url, pid=4194304, process=other)
        assert list(Run.open(url).held()) == [ATTEMPT]
        Run.open(url).store.delete(key)
    someone(url, pid=4194304, process=f"{place}.4194304.1")
    assert Run.open(url).held() == {}


def test_a_long_reader_renews_its_hold(url: Path) -> None:
    """By a further record before the first is void, and at the end neither is left."""
    run = Run.open(url)
    with holds.holding(run.store, ATTEMPT, hold_s=0.2):
        first = names(url)
        seen = set(first)

        def renewed_twice() -> bool:
            assert run.held() or holds.look(run.store, time.time() - 0.1)[0], "not a moment without a hold"
            seen.update(names(url))
            return len(seen) > 2

        wait_for(renewed_twice, "two more records")
    assert names(url) == []


@pytest.mark.parametrize("refusal", ["EROFS", "EACCES", "EPERM", "ENOSPC", "EDQUOT", "EIO"])
def test_a_store_that_takes_no_hold_is_read_without_one(url: Path, refusal: str, capfd) -> None:
    """Silently: reading needs no right to write."""
    run = Run(FaultyStore(LocalStore(url), match="holds/*", operation="create", errno=refusal))
    with run.reading(1) as found:
        assert found.attempt == ATTEMPT
        assert run.held() == {}
    assert capfd.readouterr() == ("", "")


def test_a_hold_that_cannot_be_taken_back_expires(url: Path) -> None:
    """Its reader has ended without an error."""
    run = Run(FaultyStore(LocalStore(url), match="holds/*", operation="delete", errno="EIO"))
    with run.reading(1):
        pass
    assert len(names(url)) == 1
    assert holds.look(run.store, time.time() + holds.HOLD_S + 1)[0] == {}


@pytest.mark.parametrize("jump_s", [-YEARS_S, YEARS_S], ids=["back", "ahead"])
def test_a_deleter_whose_clock_jumps(url: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Back: what is held stays held. Ahead by more than a hold's time: it is void, and the reader is told."""
    with Run.open(url).reading(1) as found:
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
        retain(Run.open(url))
        monkeypatch.undo()
        assert (url / found.attempt.folder).exists() == (jump_s < 0)
    assert Run.open(url).find().attempt.step == 3


@pytest.mark.parametrize("jump_s", [-YEARS_S, YEARS_S], ids=["back", "ahead"])
def test_a_reader_whose_clock_jumps(url: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Back: its hold is void from the start. Ahead: it counts, while its process is there, and not a moment longer."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    with Run.open(url).reading(1):
        monkeypatch.undo()
        assert bool(Run.open(url).held()) == (jump_s > 0)
    assert names(url) == []
    save(url, 4)
    retain(Run.open(url))
    assert folders(url) == ["step-00000004-w1.4"]


def test_a_void_hold_that_cannot_be_removed_keeps_nothing(url: Path) -> None:
    """Another user's, perhaps: it is told, and prune does the rest."""
    key = someone(url, until_unix_s=0.0)
    report = prune(Run(FaultyStore(LocalStore(url), match=key, operation="delete", errno="EACCES")), keep_last=1)
    assert folders(url) == ["step-00000003-w1.3"]
    assert report.removed_holds == ()
    assert [kept.what for kept in report.kept] == [key]
    assert names(url) == [key.removeprefix("holds/")]
