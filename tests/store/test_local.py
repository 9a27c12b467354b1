from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import AlreadyExistsError, BadInputError, NotFoundError, StoreError
from ckpt.store import LocalStore, direct, placing
from ckpt.store.base import Store
from ckpt.testing import StoreTests

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


class TestLocalStore(StoreTests):
    """The battery, on the file system of the temporary folder."""

    @pytest.fixture
    def store(self, root: Path) -> Store:
        """Below a folder that is absent."""
        return LocalStore(root)


class TestLocalStoreWithoutTmpfile(StoreTests):
    """The battery where a file cannot be without a name, as on NFS."""

    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        """In this process only: others race with O_TMPFILE."""
        refuse_tmpfile(monkeypatch)
        return LocalStore(root)


class TestLocalStoreInMemory(StoreTests):
    """The battery on a file system of another kind: tmpfs, where folder syncs and O_DIRECT mean nothing."""

    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        """Removed afterwards."""
        shm = Path("/dev/shm")
        if not os.access(shm, os.W_OK):
            pytest.skip("no writable /dev/shm here")
        place = shm / f"ckpt-test-{os.getpid()}-{root.parent.name}"
        yield LocalStore(place)
        shutil.rmtree(place, ignore_errors=True)


def refuse_tmpfile(monkeypatch: pytest.MonkeyPatch, code: int = errno.EOPNOTSUPP) -> None:
    real = os.open

    def refusing(path, flags, mode=0o777, *, dir_fd=None):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)


def refuse_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refusing(*_args, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refusing)


def put(store: Store, key: str, data: bytes, way: str) -> None:
    if way == "create":
        store.create(key, data)
    else:
        with store.open_sink(key) as sink:
            for start in range(0, len(data), 10_000):
                sink.write(data[start : start + 10_000])


class Trace:
    """The order of syncs and name changes, each with the path it is about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.calls: list[str] = []
        self._root = root
        for name in ("fsync", "link", "mkdir", "unlink", "rmdir"):
            self._trace(monkeypatch, name)

    def _trace(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(os, name)

        def traced(first, *rest, **options):
            target = first if name in {"fsync", "mkdir"} else rest[0] if rest else first
            folder = next((options[key] for key in ("dst_dir_fd", "dir_fd") if key in options), None)
            self.calls.append(f"{name} {self._path(target, folder)}")
            return real(first, *rest, **options)

        monkeypatch.setattr(os, name, traced)

    def _path(self, target: int | str, folder: int | None) -> str:
        if isinstance(target, int):
            path = os.readlink(f"/proc/self/fd/{target}")
        else:
            path = os.path.join("" if folder is None else os.readlink(f"/proc/self/fd/{folder}"), target)
        if " (deleted)" in path:
            return "<no name>"
        return os.path.relpath(path, self._root)


# -- durability ------------------------------------------------------------------------------


def test_create_syncs_the_file_then_links_then_syncs_the_folder(root, monkeypatch):
    """Bytes are durable before they have a name, the name before create returns."""
    store = LocalStore(root)
    store.create("a/first", b"x")
    trace = Trace(monkeypatch, root)
    store.create("a/key", b"payload")
    assert trace.calls == ["fsync <no name>", "link a/key", "fsync a"]


def test_create_without_tmpfile_links_a_synced_file(root, monkeypatch):
    """The same order under a dotted name, which is gone afterwards and was never listed."""
    store = LocalStore(root)
    store.create("a/first", b"x")
    refuse_tmpfile(monkeypatch)
    trace = Trace(monkeypatch, root)
    store.create("a/key", b"payload")
    dotted = trace.calls[0].partition("a/")[2]
    assert dotted.startswith(".")
    assert trace.calls == [f"fsync a/{dotted}", "link a/key", f"unlink a/{dotted}", "fsync a"]
    assert sorted(os.listdir(root / "a")) == ["first", "key"]


def test_new_folders_are_synced_into_the_one_above(root, monkeypatch):
    """The root, the folders above it and those below it are made durably, each name before what is in it."""
    deep = root / "not" / "yet"
    trace = Trace(monkeypatch, root.parent)
    store = LocalStore(deep)
    store.create("a/b/key", b"")
    made = ["run", "run/not", "run/not/yet", "run/not/yet/a", "run/not/yet/a/b"]
    assert [call for call in trace.calls if call.startswith("mkdir ") and call.partition(" ")[2] in made][-5:] == [
        f"mkdir {folder}" for folder in made
    ]
    above = [f"fsync {os.path.relpath(folder, root.parent)}" for folder in folders_above(root.parent)]
    syncs = [call for call in trace.calls if call.startswith("fsync")]
    assert syncs == above + [f"fsync {os.path.dirname(folder) or '.'}" for folder in made] + [
        "fsync <no name>",
        f"fsync {made[-1]}",
    ]


def test_a_folder_of_another_process_is_synced_once(root, monkeypatch):
    """Who finds a folder made cannot know whether its name is durable: the first write syncs it, later ones do not."""
    LocalStore(root).create("a/first", b"x")
    store = LocalStore(root)
    trace = Trace(monkeypatch, root)
    store.create("a/1", b"")
    store.create("a/2", b"")
    assert trace.calls == [
        *(f"fsync {os.path.relpath(folder, root)}" for folder in folders_above(root)),
        "fsync .",
        *(["fsync <no name>", "link a/1", "fsync a"]),
        "fsync <no name>",
        "link a/2",
        "fsync a",
    ]
    store.delete_folder("a")
    del trace.calls[:]
    store.create("a/1", b"")
    assert trace.calls == ["mkdir a", "fsync .", "fsync <no name>", "link a/1", "fsync a"]


def folders_above(root: Path) -> list[Path]:
    """Those of the same file system, from the top down."""
    device = root.parent.stat().st_dev
    return [folder for folder in reversed(root.parents) if folder.stat().st_dev == device]


def test_what_is_there_already_is_durable_when_create_says_so(root, monkeypatch):
    """Whoever made it may have died before the sync; the caller takes it for its own, so it is synced then."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    trace = Trace(monkeypatch, root)
    with pytest.raises(AlreadyExistsError):
        store.create("a/key", b"y")
    assert trace.calls == ["fsync a/key", "fsync a"]


def test_sync_syncs_file_and_folder(root, monkeypatch):
    """What is seen becomes what is sure."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    trace = Trace(monkeypatch, root)
    store.sync("a/key")
    assert trace.calls == ["fsync a/key", "fsync a"]
    for absent in ("a/none", "b/none"):
        with pytest.raises(NotFoundError):
            store.sync(absent)


def test_deleting_what_is_gone_makes_that_durable(root, monkeypatch):
    """It may have been removed by a process that died before the sync."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    trace = Trace(monkeypatch, root)
    store.delete("a/none")
    store.delete_folder("none")
    assert trace.calls == ["unlink a/none", "fsync a", "fsync ."]


def test_a_name_that_cannot_be_synced_is_removed_durably(root, monkeypatch):
    """Else a crash could bring it back, when what it stands for has been removed."""
    store = LocalStore(root)
    store.create("a/first", b"x")
    trace = Trace(monkeypatch, root)
    real, linked = os.fsync, []

    def failing(file):
        if trace.calls[-1:] == ["link a/key"] and not linked:
            linked.append(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreError):
        store.create("a/key", b"x")
    assert trace.calls[-2:] == ["unlink a/key", "fsync a"]


def test_a_sink_syncs_file_and_folder_when_it_closes(root, monkeypatch):
    """Nothing is synced while writing; close syncs the file, then its folder."""
    store = LocalStore(root)
    store.create("a/first", b"x")
    trace = Trace(monkeypatch, root)
    sink = store.open_sink("a/key")
    sink.write(bytes(100))
    assert trace.calls == []
    sink.close()
    assert trace.calls == ["fsync a/key", "fsync a"]


def test_deleting_is_durable(root, monkeypatch):
    """The folder is synced after an unlink, and the one above after a folder went."""
    store = LocalStore(root)
    store.create("a/b/1", b"")
    store.create("a/b/2", b"")
    trace = Trace(monkeypatch, root)
    store.delete("a/b/1")
    assert trace.calls == ["unlink a/b/1", "fsync a/b"]
    del trace.calls[:]
    store.delete_folder("a/b")
    assert trace.calls == ["unlink a/b/2", "rmdir a/b", "fsync a"]


@pytest.mark.parametrize("way", ["create", "sink"])
def test_a_failing_sync_leaves_no_object(root, monkeypatch, way):
    """When the device refuses to sync, be it file or folder, the error names the key and nothing is there."""
    store = LocalStore(root)
    store.create("a/first", b"x")
    real = os.fsync
    for failing in (0, 1):
        count = iter(range(100))

        def fsync(file, count=count, failing=failing):
            if next(count) == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(file)

        monkeypatch.setattr(os, "fsync", fsync)
        said = r"run/a/key: cannot write: .*I/O error.*earlier steps are untouched"
        with pytest.raises(StoreError, match=said) as caught:
            put(store, "a/key", b"x", way)
        assert isinstance(caught.value.__cause__, OSError)
        assert os.listdir(root / "a") == ["first"]


# -- what file systems refuse ----------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.ENOENT, errno.EOPNOTSUPP])
def test_without_links_create_still_creates_only(root, monkeypatch, code):
    """Where nothing can be linked, O_EXCL under the name itself is left; still synced, still create-only."""
    store = LocalStore(root)
    store.create("a/first", b"x")
    refuse_links(monkeypatch, code)
    trace = Trace(monkeypatch, root)
    store.create("a/key", b"payload")
    assert trace.calls[-2:] == ["fsync a/key", "fsync a"]
    assert store.get("a/key") == b"payload"
    assert sorted(os.listdir(root / "a")) == ["first", "key"]
    with pytest.raises(AlreadyExistsError):
        store.create("a/key", b"other")
    del trace.calls[:]
    store.create("a/next", b"")
    assert trace.calls == ["fsync a/next", "fsync a"], "what was refused is not tried again"


@pytest.mark.parametrize("code", [errno.EISDIR, errno.EINVAL])
def test_other_refusals_of_tmpfile(root, monkeypatch, code):
    """Old kernels and some mounts say it in other words."""
    refuse_tmpfile(monkeypatch, code)
    store = LocalStore(root)
    store.create("a/key", b"payload")
    assert store.get("a/key") == b"payload"


def test_a_lost_answer_to_link_is_not_a_second_writer(root, monkeypatch):
    """NFS may send a link request twice; the second then meets the first one's own work, and that is success."""
    refuse_tmpfile(monkeypatch)
    real = os.link

    def link(*args, **options):
        real(*args, **options)
        return real(*args, **options)

    monkeypatch.setattr(os, "link", link)
    store = LocalStore(root)
    store.create("a/key", b"payload")
    assert store.get("a/key") == b"payload"
    assert os.listdir(root / "a") == ["key"]


def test_a_lost_race_without_tmpfile(root, monkeypatch):
    """A name taken between the look and the link is AlreadyExistsError, and no dotted file stays."""
    refuse_tmpfile(monkeypatch)
    store = LocalStore(root)
    real = placing._fill

    def fill(file, data):
        (root / "a" / "key").write_bytes(b"theirs")
        real(file, data)

    monkeypatch.setattr(placing, "_fill", fill)
    with pytest.raises(AlreadyExistsError):
        store.create("a/key", b"mine")
    assert os.listdir(root / "a") == ["key"]
    assert store.get("a/key") == b"theirs"


def test_no_direct_io(root, monkeypatch):
    """Where O_DIRECT is refused, when set or when used, the page cache takes the bytes."""
    real_fcntl, real_pwrite = fcntl.fcntl, os.pwrite
    data = os.urandom(3 * MIB)

    def refuse_set(file, command, *rest):
        if command == fcntl.F_SETFL and rest[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_fcntl(file, command, *rest)

    def refuse_use(file, view, offset):
        if real_fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwrite(file, view, offset)

    for module, name, refusal in ((fcntl, "fcntl", refuse_set), (os, "pwrite", refuse_use)):
        with monkeypatch.context() as patch, mmap.mmap(-1, len(data)) as memory:
            patch.setattr(module, name, refusal)
            memory[:] = data
            with LocalStore(root).open_sink(f"a/{name}") as sink, memoryview(memory) as view:
                sink.write(view)
        assert LocalStore(root).get(f"a/{name}") == data


def test_direct_io_is_used_from_aligned_memory(root, monkeypatch):
    """Large page-aligned writes go past the page cache, the small rest does not."""
    real = os.pwrite
    seen = []

    def pwrite(file, view, offset):
        seen.append((bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT), offset, len(view)))
        return real(file, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with LocalStore(root).open_sink("key") as sink, mmap.mmap(-1, 3 * MIB) as memory, memoryview(memory) as view:
        sink.write(bytes(4096))
        sink.write(view[: 2 * MIB])
        sink.write(view[: MIB + 5])
        sink.write(view[: 2 * MIB])
    assert seen == [
        (False, 0, 4096),
        (True, 4096, 2 * MIB),
        (True, 4096 + 2 * MIB, MIB),
        (False, 4096 + 3 * MIB, 5),
        (False, 4101 + 3 * MIB, 2 * MIB),
    ]


@pytest.mark.parametrize(("huge", "pieces"), [(True, [5]), (False, [2, 2, 1])])
def test_direct_io_from_pages_of_either_size(root, monkeypatch, huge, pieces):
    """Where shared memory lies in small pages, direct writes go through a huge one; the bytes are the same."""
    real = os.pwrite
    seen = []

    def pwrite(file, view, offset):
        seen.append((bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT), len(view)))
        return real(file, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(direct, "shared_pages_are_huge", lambda: huge)
    data = os.urandom(5 * MIB + 3)
    with LocalStore(root).open_sink("key", 2 * len(data)) as sink, mmap.mmap(-1, len(data)) as memory:
        memory[:] = data
        with memoryview(memory) as view:
            sink.write(view)
            sink.write(view)
    assert seen == [*((True, nbytes * MIB) for nbytes in pieces), (False, 3), (False, len(data))]
    assert LocalStore(root).get("key") == data * 2


def test_a_direct_write_that_is_cut_short(root, monkeypatch):
    """In the middle of a page or at its end: what is left goes on from there."""
    real = os.pwrite
    monkeypatch.setattr(direct, "shared_pages_are_huge", lambda: False)
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: real(file, view[: 4096 * 100], offset))
    data = os.urandom(5 * MIB)
    with LocalStore(root).open_sink("key") as sink, mmap.mmap(-1, len(data)) as memory:
        memory[:] = data
        with memoryview(memory) as view:
            sink.write(view)
    assert LocalStore(root).get("key") == data


@pytest.mark.parametrize("way", ["create", "sink"])
def test_short_writes_and_reads_are_gone_on_with(root, monkeypatch, way):
    """The system may move fewer bytes than asked for; nothing is lost or repeated."""
    real_pwrite, real_preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: real_pwrite(file, view[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: real_preadv(file, [views[0][:700]], offset))
    data, store = os.urandom(10_001), LocalStore(root)
    put(store, "key", data, way)
    assert store.get("key") == data
    buffer = bytearray(5000)
    store.read_into("key", 4999, memoryview(buffer))
    assert buffer == data[4999:9999]


def test_a_device_that_takes_nothing_is_an_error(root, monkeypatch):
    """A write of no bytes at all does not loop for ever."""
    store = LocalStore(root)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StoreError, match="took no bytes"):
        store.create("key", b"x")
    assert store.list() == []


# -- a full disk -----------------------------------------------------------------------------


def test_a_file_size_limit(root):
    """RLIMIT_FSIZE stops a sink in mid-file: path and bytes are named, nothing stays, a small file still goes."""
    script = textwrap.dedent("""
        import mmap, resource, sys
        from ckpt.errors import StoreError
        from ckpt.store import open_store
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
        store = open_store(sys.argv[1])
        for data in (bytes(1 << 20), memoryview(mmap.mmap(-1, 2 << 20))):
            try:
                with store.open_sink("step/model") as sink:
                    sink.write(data)
            except StoreError as error:
                print(error)
            try:
                store.create("step/COMMIT", data)
            except StoreError as error:
                print(error)
        print(store.list("step"))
        store.create("step/COMMIT", b"small")
        print(store.list("step"))
    """)
    done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in lines[:4:2]:
        assert line.startswith(f"{root}/step/model: cannot write: the file may not grow further after 65,536 bytes")
    for line in lines[1:4:2]:
        assert line.startswith(f"{root}/step/COMMIT: cannot write: the file may not grow further in an object of ")
    assert lines[4:] == ["[]", "['COMMIT']"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "ckpt-test", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(small_disk):
    """ENOSPC names path and bytes, leaves nothing behind, and the same key goes once space is free."""
    store = LocalStore(small_disk / "run")
    store.create("step-1/COMMIT", b"kept")
    said = r"step-2/model: cannot write: no space left .* after [\d,]+ bytes .*free space"
    with pytest.raises(StoreError, match=said):
        put(store, "step-2/model", bytes(1_000_000), "sink")
    with pytest.raises(StoreError, match=r"step-2/COMMIT: .*no space left .*500,000 bytes"):
        store.create("step-2/COMMIT", bytes(500_000))
    assert store.list("step-2") == []
    assert store.get("step-1/COMMIT") == b"kept"
    with store.open_sink("step-2/model") as sink:
        sink.write(bytes(100_000))
    assert store.size("step-2/model") == 100_000


def test_a_quota(root, monkeypatch):
    """EDQUOT at close, where network file systems report it: the object is not there."""
    store = LocalStore(root)
    sink = store.open_sink("a/key")
    sink.write(b"x")
    real = os.close
    file = sink._file  # type: ignore[attr-defined]

    def close(descriptor):
        real(descriptor)
        if descriptor == file:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(StoreError, match="quota"):
            sink.close()
    assert store.list("a") == []


def test_close_after_a_failed_write_makes_no_object(root, monkeypatch):
    """A sink that has failed cannot be closed into an object, and says so."""
    store = LocalStore(root)
    sink = store.open_sink("a/key")
    with monkeypatch.context() as patch:

        def pwrite(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(StoreError, match="no space left"):
            sink.write(b"x")
    with pytest.raises(StoreError, match="failed"):
        sink.write(b"x")
    with pytest.raises(StoreError, match="because a write failed"):
        sink.close()
    assert store.list("a") == []


def test_no_descriptor_is_lost(root):
    """After good and bad operations of every kind the process has as many descriptors open as before."""
    store = LocalStore(root)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        store.create(f"a/{number}", b"x")
        store.open_sink(f"b/{number}").abort()
        with store.open_sink(f"c/{number}"):
            pass
        for verb, key in (
            (store.get, "a/9"),
            (store.size, "a/0/below"),
            (store.open_sink, "c/0"),
            (store.create, "a/0"),
        ):
            with contextlib.suppress(NotFoundError, AlreadyExistsError):
                verb(key, *([b"x"] if verb == store.create else []))
        with pytest.raises(StoreError):
            store.create("a/0/below", b"")
        store.list("a")
        store.delete_folder("b")
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files(root):
    """The error of a process without free descriptors says how to get more."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(StoreError, match="ulimit -n"):
            store.get("a/key")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- links, files and folders in the wrong place ---------------------------------------------


def test_links_below_the_root_are_not_followed(root, tmp_path):
    """A link out of the run is refused for files and folders, in reading, writing and deleting."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = LocalStore(root)
    store.create("a/key", b"x")
    (root / "a" / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "absent")
    for verb in (store.get, store.size, store.exists, lambda key: store.read_into(key, 0, memoryview(bytearray(1)))):
        for key in ("a/file", "folder/secret", "dangling"):
            with pytest.raises(StoreError, match=rf"{key}: cannot read: a symbolic link"):
                verb(key)
    with pytest.raises(StoreError, match="symbolic link"):
        store.list("folder")
    for verb in (lambda key: store.create(key, b"x"), store.open_sink):
        with pytest.raises(StoreError, match="symbolic link"):
            verb("folder/new")
        for key in ("a/file", "dangling"):
            with pytest.raises(AlreadyExistsError):
                verb(key)
    for verb in (store.delete_folder, lambda key: store.delete(f"{key}/secret")):
        with pytest.raises(StoreError, match="symbolic link"):
            verb("folder")
    store.delete("a/file")
    store.delete("dangling")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert store.list() == ["a", "folder"]


def test_a_folder_is_removed_without_following_its_links(root, tmp_path):
    """What a link in a removed folder points at stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    store = LocalStore(root)
    store.create("a/b/key", b"x")
    (root / "a" / "link").symlink_to(outside)
    (root / "a" / "b" / ".dotted").write_bytes(b"x")
    store.delete_folder("a")
    assert store.list() == []
    assert (outside / "precious").exists()


def test_the_root_may_be_a_link(root, tmp_path):
    """A user's own link to where the run lies is followed."""
    (tmp_path / "link").symlink_to(root)
    LocalStore(root).create("a/key", b"x")
    assert LocalStore(tmp_path / "link").get("a/key") == b"x"


def test_a_root_that_is_a_file(tmp_path):
    """A file, or a path below one, is no root; the error says so at once."""
    (tmp_path / "file").write_bytes(b"x")
    for place in ("file", "file/run"):
        with pytest.raises(BadInputError, match=f"{place}: is a file, or lies below one; expected a folder"):
            LocalStore(tmp_path / place)


def test_a_root_that_becomes_a_file(root):
    """The same found later is an error of the store, not an absence."""
    store = LocalStore(root)
    root.write_bytes(b"x")
    for verb in (store.get, store.size, store.exists, store.open_sink, store.delete, store.list, store.delete_folder):
        with pytest.raises(StoreError, match="a file stands where a folder is expected"):
            verb("key")


def test_writing_below_an_object_is_an_error(root):
    """On a file system an object cannot be a folder too; the error says what stands there."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    for verb in (store.open_sink, lambda key: store.create(key, b"x")):
        with pytest.raises(StoreError, match=r"a/key/below: cannot write: a file stands where a folder is expected"):
            verb("a/key/below")


def test_a_fifo_does_not_hang_its_reader(root):
    """What is neither file nor folder is refused at once."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    os.mkfifo(root / "a" / "fifo")
    for verb in (store.get, store.size):
        with pytest.raises(StoreError, match="neither file nor folder"):
            verb("a/fifo")


def test_names_that_are_no_keys_are_not_listed(root):
    """Dotted names (unfinished, of NFS, of a desktop) and names that are no text are not ckpt's."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    for name in (b".nfs0000", b".DS_Store", b"\xff\xfe"):
        with open(os.path.join(os.fsencode(root), b"a", name), "wb"):
            pass
    assert store.list("a") == ["key"]


def test_a_read_only_file_system(small_disk):
    """Reading goes on; writing and deleting are refused with what to do."""
    store = LocalStore(small_disk / "run")
    store.create("a/key", b"x")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert store.get("a/key") == b"x"
    for verb in (store.open_sink, lambda key: store.create(key, b"x")):
        with pytest.raises(StoreError, match=r"a/new: cannot write: the file system is read-only; remount it"):
            verb("a/new")
        with pytest.raises(StoreError, match=r"new/key: cannot write: the file system is read-only"):
            verb("new/key")
    with pytest.raises(StoreError, match=r"a/key: cannot delete: the file system is read-only"):
        store.delete("a/key")
    with pytest.raises(StoreError, match=r"a: cannot delete: the file system is read-only"):
        store.delete_folder("a")


def test_a_place_that_takes_no_folders():
    """Where nobody may make the root, not even the superuser, writing says so and reading says absent."""
    store = LocalStore("/proc/ckpt-test-run")
    with pytest.raises(StoreError, match=r"/proc/ckpt-test-run/a/key: cannot write: .*earlier steps are untouched"):
        store.create("a/key", b"x")
    assert store.list("a") == []
    assert store.exists("a/key") is False


def test_opening_and_reading_makes_nothing(root):
    """The root is made by the first write, not by looking."""
    store = LocalStore(root)
    assert store.list() == []
    assert store.exists("a/key") is False
    store.delete("a/key")
    store.delete_folder("a")
    assert not root.exists()


def test_the_root_stays_where_it_was(root, tmp_path, monkeypatch):
    """A relative root is taken from the folder that was current when the store was opened."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run")
    monkeypatch.chdir("/")
    store.create("a/key", b"x")
    assert (root / "a" / "key").read_bytes() == b"x"
    assert store.url == str(root)


def test_the_mode_follows_the_umask(root):
    """Files and folders are readable as the user's umask says, by either way of writing."""
    old = os.umask(0o027)
    try:
        store = LocalStore(root)
        store.create("a/created", b"x")
        with store.open_sink("a/sunk"):
            pass
    finally:
        os.umask(old)
    modes = {name: (root / name).stat().st_mode & 0o777 for name in ("", "a", "a/created", "a/sunk")}
    assert modes == {"": 0o750, "a": 0o750, "a/created": 0o640, "a/sunk": 0o640}


def test_a_folder_someone_keeps_filling(root, monkeypatch):
    """delete_folder gives up with an error when names keep coming; .nfs leftovers of open files are let be."""
    store = LocalStore(root)
    store.create("a/key", b"x")
    real = os.rmdir

    def rmdir(name, *, dir_fd=None):
        (root / "a" / new).write_bytes(b"x")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    new = "again"
    with pytest.raises(StoreError, match="keeps writing into the folder"):
        store.delete_folder("a")
    new = ".nfs0001"
    store.delete_folder("a")
    assert store.list("a") == []
