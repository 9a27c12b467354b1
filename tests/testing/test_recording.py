from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckpt.errors import NotFoundError
from ckpt.store import LocalStore
from ckpt.testing import FaultyStore, RecordingStore, read_log


@pytest.fixture
def inner(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def use(store: RecordingStore) -> None:
    store.create("a/created", b"12345")
    with store.open_sink("a/sunk") as sink:
        sink.write(b"123")
        sink.write(b"4")
    store.open_sink("a/aborted").abort()
    store.get("a/sunk")
    store.read_into("a/sunk", 1, memoryview(bytearray(2)))
    store.exists("a/b c%\n")
    store.list()
    store.delete("a/created")
    store.delete_folder("a")


USED = [
    ("create", "a/created", 5, "ok"),
    ("open_sink", "a/sunk", 0, "ok"),
    ("write", "a/sunk", 3, "ok"),
    ("write", "a/sunk", 1, "ok"),
    ("close", "a/sunk", 4, "ok"),
    ("open_sink", "a/aborted", 0, "ok"),
    ("abort", "a/aborted", 0, "ok"),
    ("get", "a/sunk", 4, "ok"),
    ("read_into", "a/sunk", 2, "ok"),
    ("size", "a/b c%\n", 0, "NotFoundError"),
    ("list", "", 0, "ok"),
    ("delete", "a/created", 0, "ok"),
    ("delete_folder", "a", 0, "ok"),
]


def test_every_operation_is_written_down_in_order(inner, tmp_path):
    """Operation, key, bytes and outcome, in memory and in the log alike, with times that do not overlap."""
    store = RecordingStore(inner, log=tmp_path / "log")
    use(store)
    assert [(done.op, done.key, done.nbytes, done.outcome) for done in store.done] == USED
    assert read_log(tmp_path / "log") == store.done
    for first, second in zip(store.done, store.done[1:], strict=False):
        assert first.start_ns <= first.end_ns <= second.start_ns
    assert {done.pid for done in store.done} == {os.getpid()}


def test_a_log_line_begins_with_operation_key_and_bytes(inner, tmp_path):
    """A line can be read by eye and by ``split``."""
    store = RecordingStore(inner, log=tmp_path / "log")
    store.create("a/b c", b"12345")
    store.list()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[:3] for line in lines] == [["create", "a/b%20c", "5"], ["list", ".", "0"]]


def test_what_is_recorded_can_be_chosen(inner, tmp_path):
    """Only matching operations get a line."""
    store = RecordingStore(inner, log=tmp_path / "log", operation=["create", "delete"], match="a/cr*")
    use(store)
    assert [done.op for done in read_log(tmp_path / "log")] == ["create", "delete"]


def test_failures_are_recorded_as_such(inner, tmp_path):
    """The error's class is the outcome, and the error goes on to the caller."""
    store = RecordingStore(FaultyStore(inner, errno="ENOENT"), log=tmp_path / "log")
    with pytest.raises(NotFoundError):
        store.get("key")
    assert [done.outcome for done in read_log(tmp_path / "log")] == ["NotFoundError"]


def test_lines_of_threads_do_not_mix(inner, tmp_path):
    """Many writers of one log leave whole lines."""
    inner.create("key", b"x")
    stores = [RecordingStore(inner, log=tmp_path / "log") for _ in range(8)]
    threads = [threading.Thread(target=lambda s=s: [s.get("key") for _ in range(25)]) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(done.op, done.nbytes) for done in read_log(tmp_path / "log")] == [("get", 1)] * 200


def test_no_log_is_an_empty_one(tmp_path):
    """Where nothing was done there is no file."""
    assert read_log(tmp_path / "absent") == []
