from __future__ import annotations

import errno
import gc
import io
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import ckpt
from ckpt.errors import AlreadyExistsError, BadInputError, CkptError, NotFoundError, StoreError
from ckpt.store import fsspec as fsspec_store
from ckpt.store import open_store
from ckpt.store.base import Store
from ckpt.testing import StoreTests
from tests.store import objects
from tests.store.objects import misbehave


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """A URL in this process's memory, emptied afterwards."""
    yield f"memory://{tmp_path.name}"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(f"/{tmp_path.name}"):
        filesystem.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Object storage that every process reaches."""
    objects.reach_keepers(monkeypatch, tmp_path)
    return f"object://{tmp_path}/run"


class TestMemory(StoreTests):
    """The battery in this process's memory, which no other process sees."""

    reopens = False

    @pytest.fixture
    def store(self, memory: str) -> Store:
        return open_store(memory)


class TestLocalFiles(StoreTests):
    """The battery on fsspec's own local files."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Below a folder that is absent."""
        return open_store(f"fsspec+file://{tmp_path}/run")


class TestObjects(StoreTests):
    """The battery on object storage: held until close, no descriptor, no folders, create only if absent."""

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)


class TestObjectsWithoutConditions(StoreTests):
    """The battery where nothing is created only if absent: one process at a time."""

    reopens = False  # another process would race for keys, which such a storage cannot decide

    @pytest.fixture
    def store(self, url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        misbehave(monkeypatch, conditional=False)
        return open_store(url)


class TestBufferedObjects(StoreTests):
    """The battery with fsspec's own buffered files, which send blocks and end an object when they are closed."""

    reopens = False  # the others race for it above

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url.replace("object://", "buffered://"))


class TestGrowingFiles(StoreTests):
    """The battery on files of a server: folders, and files that are seen while they grow."""

    reopens = False  # the races are decided by the server
    whole = False

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url.replace("object://", "growing://"))


# -- opening -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("memory://x/", "memory://x"),
        ("MEMORY://x", "memory://x"),
        ("fsspec+memory://x", "fsspec+memory://x"),
        ("memory://x[0", "memory://x[0"),
    ],
)
def test_a_url_that_opens_again(url, same):
    """The store's own URL opens the same store; the scheme is in small letters, as fsspec knows it."""
    store = open_store(url)
    assert store.url == same
    assert open_store(store.url).url == same


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nothing://x", "Protocol not known: nothing"),
        ("fsspec+file://data/run", "three slashes"),
        ("sftp://user:secret@host/run", "a password in a URL ends up in logs"),
    ],
)
def test_a_url_that_opens_nothing(url, said):
    """What is wrong is said, a password not repeated."""
    with pytest.raises(BadInputError, match=said) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_a_root_that_is_a_file(tmp_path):
    """As for a path."""
    (tmp_path / "run").write_bytes(b"x")
    with pytest.raises(BadInputError, match="is a file"):
        open_store(f"fsspec+file://{tmp_path}/run")


def test_fsspec_is_loaded_only_where_it_is_needed():
    """``import ckpt`` and a path cost nothing of it."""
    code = "import sys, ckpt, ckpt.store; ckpt.store.open_store('/run'); sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_is_read_but_not_saved_to(memory):
    """The keeper would write into memory of its own: the first save says so, and nothing is written."""
    with pytest.raises(BadInputError, match="lives in the memory of this one process") as caught:
        ckpt.save(memory, 1, {"value": 1})
    assert str(caught.value).count(". ") == 0
    assert open_store(memory).list() == []
    assert ckpt.latest(memory) is None


# -- create only if absent -----------------------------------------------------------------------


def ways(store: Store) -> str:
    """How this process makes objects there."""
    return fsspec_store._ways[store.url]


def test_each_file_system_has_its_way(url, memory, tmp_path, caplog):
    """Found out by trying; nothing of the trial stays, and nothing is said where it worked."""
    local, growing = f"fsspec+file://{tmp_path}/files", url.replace("object", "growing")
    with caplog.at_level(logging.WARNING):
        for place, way in ((memory, "put"), (local, "link"), (url, "put"), (growing + "2", "exclusive")):
            store = open_store(place)
            store.create("a/key", b"x")
            assert ways(store) == way
            assert store.list() == ["a"]
    assert os.listdir(tmp_path / "run") == ["a"]
    assert os.listdir(tmp_path / "files") == ["a"]
    assert not caplog.records


def test_a_file_system_without_conditions_is_told_of_once(url, monkeypatch, caplog):
    """Not when it is opened and not when it is read: when it is first written to."""
    misbehave(monkeypatch, conditional=False)
    store = open_store(url)
    assert store.list() == []
    assert not caplog.records
    store.create("a/1", b"x")
    with open_store(url).open_sink("a/2") as sink:
        sink.write(b"x")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{url}: this file system cannot create an object only if it is absent; only one job at a time may write to "
        "this run (a second one is noticed when it has written, not before)"
    )
    assert ways(store) == "checked"
    with pytest.raises(AlreadyExistsError):
        store.create("a/1", b"y")


def test_a_second_writer_without_conditions_is_noticed(url, monkeypatch):
    """Another process writes the key between the look and the put: what is read back is not ours."""
    misbehave(monkeypatch, conditional=False)
    store = open_store(url)
    store.create("other", b"")
    place = objects.ObjectFileSystem.place

    def raced(self, path, value, only_new):
        place(self, path, value, only_new)
        place(self, path, b"theirs", only_new)

    monkeypatch.setattr(objects.ObjectFileSystem, "place", raced)
    with pytest.raises(CkptError):
        store.create("a/key", b"mine!!")
    assert store.get("a/key") == b"theirs"


def test_a_key_taken_while_a_sink_was_open(url):
    """Nothing shows that a sink is open; whoever comes later loses, and removes nothing."""
    store = open_store(url)
    sink = store.open_sink("a/key")
    sink.write(b"late")
    store.create("a/key", b"first")
    with pytest.raises(AlreadyExistsError):
        sink.close()
    del sink
    gc.collect()
    assert store.get("a/key") == b"first"


# -- objects that count when they are closed -----------------------------------------------------


def test_no_descriptor_is_asked_for(url):
    """The stub's files have none, and hold all bytes until they are closed."""
    store = open_store(url)
    with store.open_sink("a/key", 2 << 20) as sink:
        sink.write(bytes(1 << 20))
        assert store.list("a") == []
        assert store.exists("a/key") is False
        sink.write(bytes(1 << 20))
    assert open_store(url).get("a/key") == bytes(2 << 20)


@pytest.mark.parametrize("way", ["create", "sink"])
@pytest.mark.parametrize(
    ("scheme", "when"),
    [(s, w) for s in ("object", "buffered") for w in ("write", "close", "late")]
    + [("growing", "write"), ("growing", "close")],
)
def test_an_object_whose_file_fails_is_not_there(url, monkeypatch, way, scheme, when):
    """Write fails, close fails, or close fails though the object arrived: the error comes, the object does not."""
    store = open_store(url.replace("object", scheme, 1))
    store.create("other", b"")
    misbehave(monkeypatch, fail=[("*/key", when)])
    with pytest.raises(StoreError, match=r"a/key: cannot write: .*boom") as caught:
        if way == "create":
            store.create("a/key", b"payload")
        else:
            with store.open_sink("a/key", 7) as sink:
                sink.write(b"payload")
    assert isinstance(caught.value.__cause__, OSError)
    gc.collect()  # a file that is taken back must not become an object
    misbehave(monkeypatch)
    assert store.exists("a/key") is False
    assert store.list("a") == []
    store.create("a/key", b"again")


@pytest.mark.parametrize("scheme", ["object", "buffered", "growing", "memory", "fsspec+file"])
def test_an_exception_in_the_block_publishes_nothing(url, scheme):
    """Not even when the file's memory is taken back, which closes it."""
    store = open_store(url.replace("object", scheme, 1))
    with pytest.raises(ZeroDivisionError), store.open_sink("a/key") as sink:
        sink.write(bytes(1 << 20))
        raise ZeroDivisionError
    del sink
    gc.collect()
    assert store.list("a") == []


def test_a_close_that_stored_something_else(url, monkeypatch):
    """The size that the storage tells is compared with what was written; what is wrong is removed."""
    store = open_store(url)
    place = objects.ObjectFileSystem.place
    monkeypatch.setattr(
        objects.ObjectFileSystem, "place", lambda self, path, value, new: place(self, path, value[:-1], new)
    )
    with pytest.raises(StoreError, match=r"a/key: 7 bytes were written .* but it has 6 bytes"):
        store.create("a/key", b"payload")
    with (
        pytest.raises(StoreError, match=r"a/sunk: 7 bytes were written .* but it has 6 bytes"),
        store.open_sink("a/sunk") as sink,
    ):
        sink.write(b"payload")
    monkeypatch.setattr(objects.ObjectFileSystem, "place", lambda *_: None)
    with (
        pytest.raises(StoreError, match=r"a/gone: 7 bytes were written .* but it is not there"),
        store.open_sink("a/gone") as sink,
    ):
        sink.write(b"payload")
    assert store.list() == []


# -- caches and lag ------------------------------------------------------------------------------


def test_no_listing_comes_from_a_cache(url):
    """What another client of the storage did is seen at once."""
    ours, theirs = open_store(url), open_store(url)
    ours.create("a/1", b"")
    assert (ours.list("a"), theirs.list("a")) == (["1"], ["1"])
    theirs.create("a/2", b"")
    assert ours.list("a") == ["1", "2"]
    ours.delete("a/1")
    assert theirs.list("a") == ["2"]


def test_a_key_is_asked_for_itself(url, monkeypatch):
    """A listing that lags hides what is there and shows what is gone; the keys say the truth."""
    store = open_store(url)
    misbehave(monkeypatch, lag_s=60)
    store.create("a/new", b"x")
    assert store.list("a") == []
    assert store.exists("a/new")
    with pytest.raises(AlreadyExistsError):
        store.create("a/new", b"y")
    store.delete("a/new")
    assert store.list("a") == ["new"]
    assert store.exists("a/new") is False
    with pytest.raises(NotFoundError):
        store.get("a/new")
    store.delete("a/new")
    store.delete_folder("a")


# -- errors --------------------------------------------------------------------------------------


class Troubled:
    """Has a file system's method fail with these errors, one after the other, and then work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, *errors: Exception, after: bool = False) -> None:
        self.errors, self.calls = list(errors), 0
        real = getattr(objects.ObjectFileSystem, method)

        def call(filesystem, *args, **options):
            self.calls += 1
            if self.errors and not after:
                raise self.errors.pop(0)
            result = real(filesystem, *args, **options)
            if self.errors:
                raise self.errors.pop(0)
            return result

        monkeypatch.setattr(objects.ObjectFileSystem, method, call)


class BusyError(Exception):
    """What an HTTP client raises, with a number."""

    status = 503


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("slow"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        OSError(errno.EAGAIN, "again"),
        BusyError(),
    ],
    ids=["time-out", "reset", "again", "busy"],
)
def test_what_passes_is_tried_again(url, monkeypatch, error):
    """Reading, listing, looking, creating and deleting wait out what is transient."""
    store = open_store(url)
    store.create("a/key", b"payload")
    for method, call, expected in (
        ("info", lambda: store.size("a/key"), 7),
        ("ls", lambda: store.list("a"), ["key"]),
        ("cat_file", lambda: store.get("a/key"), b"payload"),
        ("pipe_file", lambda: store.create("a/new", b"x"), None),
        ("rm_file", lambda: store.delete("a/new"), None),
    ):
        with monkeypatch.context() as patch:
            troubled = Troubled(patch, method, error, error)
            assert call() == expected
            assert troubled.calls >= 3
    assert store.list("a") == ["key"]


def test_a_put_whose_answer_was_lost_is_done(url, monkeypatch):
    """The object arrived, its answer did not: the second try finds it and is content."""
    store = open_store(url)
    store.create("other", b"")
    troubled = Troubled(monkeypatch, "pipe_file", TimeoutError("lost"), after=True)
    store.create("a/key", b"payload")
    assert troubled.calls == 1
    assert store.get("a/key") == b"payload"


def test_a_lost_answer_does_not_take_the_key_of_another(url, monkeypatch):
    """What is found after a lost answer is another's: taken, and left alone."""
    store = open_store(url)
    store.create("other", b"")

    def lose(filesystem, path, value, mode="overwrite"):
        filesystem.place(path, b"theirs", only_new=True)
        raise TimeoutError("lost")

    monkeypatch.setattr(objects.ObjectFileSystem, "pipe_file", lose)
    with pytest.raises(AlreadyExistsError):
        store.create("a/key", b"mine")
    assert store.get("a/key") == b"theirs"


def test_what_does_not_pass_is_given_up(url, monkeypatch):
    """After ``retry_timeout_s`` the last error is told."""
    store = fsspec_store.FsspecStore(url, retry_timeout_s=0.2)
    store.create("a/key", b"x")
    troubled = Troubled(monkeypatch, "cat_file", *[TimeoutError("the server is slow")] * 100)
    started = time.monotonic()
    with pytest.raises(StoreError, match="a/key: cannot read: the server is slow"):
        store.get("a/key")
    assert 1 < troubled.calls < 10
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("Forbidden"), r"permission denied \(Forbidden\); check the credentials"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "the device reports an I/O error"),
        (ValueError("odd"), "ValueError: odd"),
        (io.UnsupportedOperation("no"), "no"),
    ],
)
def test_what_is_final_is_said_at_once(url, monkeypatch, error, said):
    """Once, in a sentence with the key, and never as absence."""
    store = open_store(url)
    store.create("a/key", b"x")
    troubled = Troubled(monkeypatch, "info", *[error] * 5)
    for call in (store.exists, store.get, store.size):
        before = troubled.calls
        with pytest.raises(StoreError, match=rf"a/key: cannot read: {said}"):
            call("a/key")
        assert troubled.calls == before + 1


def test_a_link_is_not_followed(tmp_path):
    """As in a path's store."""
    store = open_store(f"fsspec+file://{tmp_path}/run")
    store.create("a/key", b"x")
    (tmp_path / "run" / "a" / "link").symlink_to(tmp_path / "run" / "a" / "key")
    with pytest.raises(StoreError, match="a symbolic link"):
        store.get("a/link")
    os.mkfifo(tmp_path / "run" / "a" / "pipe")
    assert stat.S_ISFIFO(os.stat(tmp_path / "run" / "a" / "pipe").st_mode)
    with pytest.raises(StoreError, match="neither a file of known size nor a folder"):
        store.get("a/pipe")
    store.delete_folder("a")
    assert store.list() == []
