from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from ckpt.errors import AlreadyExistsError, BadInputError, NotFoundError, StoreError
from ckpt.store import LocalStore
from ckpt.store.base import Store
from ckpt.testing import (
    BlockingStore,
    FaultyStore,
    RecordingStore,
    ShortStore,
    SlowStore,
    StoreTests,
    WrappedStore,
)


@pytest.fixture
def inner(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


class TestWrappedStores(StoreTests):
    """A store in wrappers that have nothing to do is a store like any other."""

    @pytest.fixture
    def store(self, inner: LocalStore, tmp_path: Path) -> Store:
        """All of them."""
        store: Store = FaultyStore(inner, match="never")
        store = SlowStore(store, delay_s=0)
        store = BlockingStore(store, release=tmp_path)
        return RecordingStore(WrappedStore(store), log=tmp_path / "log")


# -- which operations ------------------------------------------------------------------------


def test_every_operation_can_fail(inner):
    """Each verb of stores and sinks but abort fails on request, with the key, and the cause kept."""
    inner.create("a/key", b"12345")
    verbs = {
        "get": lambda store: store.get("a/key"),
        "read_into": lambda store: store.read_into("a/key", 0, memoryview(bytearray(1))),
        "size": lambda store: store.size("a/key"),
        "list": lambda store: store.list("a/key"),
        "create": lambda store: store.create("a/key", b"x"),
        "open_sink": lambda store: store.open_sink("a/key"),
        "write": lambda store: put(store, "a/write"),
        "close": lambda store: put(store, "a/close"),
        "delete": lambda store: store.delete("a/key"),
        "delete_folder": lambda store: store.delete_folder("a"),
    }
    for operation, verb in verbs.items():
        with pytest.raises(StoreError, match=rf"/run/a.*I/O error \(boom {operation}\)") as caught:
            verb(FaultyStore(inner, operation=operation, errno="EIO", message=f"boom {operation}"))
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EIO
    assert inner.get("a/key") == b"12345"
    assert inner.list("a") == ["key"]


def put(store: Store, key: str, *pieces: bytes) -> None:
    with store.open_sink(key) as sink:
        for piece in pieces or (b"x",):
            sink.write(piece)


@pytest.mark.parametrize(
    ("match", "hit"),
    [("*", True), ("part-*", True), ("step-1/*", True), ("step-1/part-0", True), ("part", False), ("step-2/*", False)],
)
def test_patterns_match_keys_or_their_last_component(inner, match, hit):
    """``part-*`` finds parts in any folder."""
    assert FaultyStore(inner, match=match).concerns("create", "step-1/part-0") is hit


def test_groups_of_operations(inner):
    """Several names, and the groups; an unknown name is refused."""
    assert FaultyStore(inner, operation=["create", "close"]).operations == {"create", "close"}
    assert FaultyStore(inner, operation="reading").operations == {"get", "read_into", "size", "list"}
    assert "abort" not in FaultyStore(inner).operations
    assert "abort" in RecordingStore(inner, operation="mutating").operations
    with pytest.raises(BadInputError, match="unknown operation"):
        FaultyStore(inner, operation="creat")
    with pytest.raises(BadInputError, match="unknown errno"):
        FaultyStore(inner, errno="ENOSPICE")


# -- when ------------------------------------------------------------------------------------


def test_the_second_one_fails(inner):
    """``on_nth`` counts from 1, once."""
    store = FaultyStore(inner, operation="create", match="part-*", on_nth=2)
    store.create("other", b"")
    store.create("part-0", b"")
    with pytest.raises(StoreError):
        store.create("part-1", b"")
    store.create("part-1", b"")
    assert inner.list() == ["other", "part-0", "part-1"]


@pytest.mark.parametrize("limit", [0, 1, 15, 20, 25])
def test_a_device_that_fills_up(inner, limit):
    """Whatever exceeds the limit fails, after what fits was written; the object is gone, and nothing new goes."""
    store = FaultyStore(inner, operation="mutating", errno="ENOSPC", after_nbytes=limit)
    with pytest.raises(StoreError, match=rf"no space left .*after {limit % 10} byte"):
        put(store, "a/key", bytes(10), bytes(10), bytes(10))
    assert inner.list("a") == []
    with pytest.raises(StoreError):
        store.create("a/key", b"x")
    with pytest.raises(StoreError):
        put(store, "a/key", b"")


def test_the_last_byte_fits(inner):
    """An object that just fits is written in full, and what comes after it fails."""
    store = FaultyStore(inner, operation=["write", "create"], errno="ENOSPC", after_nbytes=20)
    put(store, "a/key", bytes(10), bytes(10))
    assert inner.size("a/key") == 20
    with pytest.raises(StoreError):
        store.create("a/other", b"x")


def test_a_full_device_at_close(inner):
    """With ``close`` among the operations a device filled to the last byte refuses to close."""
    store = FaultyStore(inner, operation=["write", "close"], errno="EDQUOT", after_nbytes=10)
    with pytest.raises(StoreError, match="quota"):
        put(store, "a/key", bytes(10))
    assert inner.list("a") == []


def test_half_a_write(inner):
    """``on_nth`` with ``after_nbytes``: the K-th write takes that many of its bytes."""
    store = FaultyStore(inner, operation="write", on_nth=2, after_nbytes=3)
    sink = store.open_sink("key")
    sink.write(b"12345")
    with pytest.raises(StoreError):
        sink.write(b"67890")
    assert inner.get("key") == b"12345678"
    sink.abort()


@pytest.mark.parametrize("operation", ["create", "close", "write"])
def test_a_lost_answer(inner, operation):
    """``after``: it was done, and the caller is told that it failed."""
    store = FaultyStore(inner, operation=operation, errno="ETIMEDOUT", after=True)
    sink = store.open_sink("sunk")
    if operation == "create":
        with pytest.raises(StoreError, match="ETIMEDOUT"):
            store.create("key", b"payload")
        assert inner.get("key") == b"payload"
    elif operation == "write":
        with pytest.raises(StoreError, match="ETIMEDOUT"):
            sink.write(b"payload")
        assert inner.get("sunk") == b"payload"
    else:
        sink.write(b"payload")
        with pytest.raises(StoreError, match="ETIMEDOUT"):
            sink.close()
        assert inner.get("sunk") == b"payload"


def test_a_fault_that_is_put_right(inner, tmp_path):
    """While the ``unless`` path is there the fault sleeps."""
    store = FaultyStore(inner, operation="create", errno="ENOSPC", after_nbytes=0, unless=tmp_path / "freed")
    with pytest.raises(StoreError):
        store.create("key", b"x")
    (tmp_path / "freed").touch()
    store.create("key", b"x")
    (tmp_path / "freed").unlink()
    with pytest.raises(StoreError):
        store.create("other", b"x")


def test_errors_of_their_own_kind(inner):
    """ENOENT is an absence and EEXIST a taken key, as in a real store."""
    inner.create("key", b"x")
    with pytest.raises(NotFoundError):
        FaultyStore(inner, errno=errno.ENOENT).get("key")
    assert FaultyStore(inner, errno="ENOENT").exists("key") is False
    with pytest.raises(AlreadyExistsError):
        FaultyStore(inner, errno="EEXIST").create("new", b"x")


# -- slow, and standing still ----------------------------------------------------------------


def test_slow(inner):
    """Each matching operation waits, others do not."""
    store = SlowStore(inner, match="*.slow", operation="create", delay_s=0.02, bytes_per_s=1e6)
    start = time.perf_counter()
    store.create("a.slow", bytes(30_000))
    assert time.perf_counter() - start >= 0.05
    start = time.perf_counter()
    for number in range(3):
        store.size("a.slow")
        SlowStore(inner, match="*.slow", delay_s=5).create(f"{number}.quick", b"")
    assert time.perf_counter() - start < 5


def test_blocking(inner, tmp_path):
    """The operation tells that it waits, and goes on when it is released; others pass."""
    release, waiting = tmp_path / "release", tmp_path / "waiting"
    store = BlockingStore(inner, match="COMMIT", operation="create", release=release, waiting=waiting)
    store.create("other", b"x")
    assert not waiting.exists()
    thread = threading.Thread(target=store.create, args=("a/COMMIT", b"x"))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not waiting.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert inner.exists("a/COMMIT") is False
    finally:
        release.touch()
        thread.join(timeout=30)
    assert inner.get("a/COMMIT") == b"x"
    waiting.unlink()
    store.create("b/COMMIT", b"x")
    assert not waiting.exists()


def test_blocking_does_not_hang(inner, tmp_path):
    """Never released, the operation fails in the end, saying what it waited for."""
    store = BlockingStore(inner, release=tmp_path / "never", timeout_s=0.01)
    with pytest.raises(StoreError, match=r"key: get was held .*never never came"):
        store.get("key")


def test_by_lot(inner):
    """``chance`` makes some fail and some not; 1 is all of them, 0 none."""
    store = FaultyStore(inner, operation="size", chance=0.5)
    outcomes = set()
    for _ in range(1000):
        try:
            store.size("key")
        except NotFoundError:
            outcomes.add("passed")
        except StoreError:
            outcomes.add("failed")
    assert outcomes == {"passed", "failed"}
    with pytest.raises(NotFoundError):
        FaultyStore(inner, operation="size", chance=0.0).size("key")


@pytest.mark.parametrize("most_nbytes", [1, 7, 4096])
def test_short_writes(inner, most_nbytes):
    """The system takes less than it is given, of files that grow and of such that appear at once; none is cut."""
    store = ShortStore(inner, match="short-*", most_nbytes=most_nbytes)
    payload = bytes(range(256)) * 40
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        pwrite = os.pwrite
        patch.setattr(os, "pwrite", lambda file, view, at: taken.append(len(view)) or pwrite(file, view, at))
        for name in ("short-1", "whole-1"):
            put(store, name, payload)
            store.create(name.replace("1", "2"), payload)
    assert {inner.get(name) for name in ("short-1", "short-2", "whole-1", "whole-2")} == {payload}
    assert max(taken) == len(payload)
    assert sorted(taken)[:2] == [min(most_nbytes, len(payload) % most_nbytes or most_nbytes)] * 2
    with pytest.raises(BadInputError, match="most_nbytes=0"):
        ShortStore(inner, most_nbytes=0)
