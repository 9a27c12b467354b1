"""Reading local files: what the page cache holds, what lies on the disk only, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, DamagedError, NotFoundError, StoreError
from ckpt.store import LocalStore, direct, local_source, page_cache

MIB = 1 << 20
NBYTES = 5 * MIB + 4097  # neither whole blocks nor whole pages


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture
def data(store: LocalStore) -> bytes:
    """What ``a/key`` holds."""
    data = random.Random(0).randbytes(NBYTES)
    store.create("a/key", data)
    return data


def path(store: LocalStore, key: str = "a/key") -> Path:
    return Path(store.root) / key


def drop_cache(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(file: Path) -> int:
    """Bytes of the file in the page cache, or a skip where nobody knows."""
    with file.open("rb") as opened:
        found = page_cache.cached_nbytes(opened.fileno(), 0, file.stat().st_size)
    if found is None:
        pytest.skip("this kernel has no cachestat")
    return found


def read_cold(store: LocalStore, offset: int, nbytes: int, seen=None, *, shared=False) -> bytes:
    """Read a range of ``a/key`` after it has left the page cache."""
    into = bytearray(b"\xaa" * (nbytes + 2))
    with store.open_source("a/key", shared=shared) as source:
        drop_cache(path(store))
        source.read_into(offset, memoryview(into)[1:-1], seen)
    assert into[0] == into[-1] == 0xAA
    return bytes(into[1:-1])


def takes_direct_reads(file: Path) -> bool:
    try:
        opened = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.preadv(opened, [direct.bounce()], 0)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each preadv that follows: whether its descriptor has O_DIRECT."""
    real, found = os.preadv, []

    def preadv(file, views, offset):
        found.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        return real(file, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


RANGES = [
    (0, NBYTES),
    (0, 2 * MIB),
    (1, 2 * MIB),
    (4095, 300_000),
    (4096, 300_001),
    (MIB - 1, MIB + 2),
    (NBYTES - 200_000, 200_000),
    (NBYTES - 5, 5),
    (123, 4096),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range(store, data, offset, nbytes, shared):
    """Ranges of odd sizes at odd offsets come back bit for bit, cold and warm, and are shown once, in order."""
    for read in (read_cold, read_warm):
        shown = bytearray()
        assert read(store, offset, nbytes, shown.extend, shared=shared) == data[offset : offset + nbytes]
        assert shown == data[offset : offset + nbytes]


def read_warm(store: LocalStore, offset: int, nbytes: int, seen=None, *, shared=False) -> bytes:
    path(store).read_bytes()
    into = bytearray(nbytes)
    with store.open_source("a/key", shared=shared) as source:
        source.read_into(offset, memoryview(into), seen)
    return bytes(into)


def test_what_is_not_cached_is_read_past_the_cache(store, data, ways):
    """A cold range leaves no trace in the page cache; a cached one is taken from there."""
    if not takes_direct_reads(path(store)):
        pytest.skip("no O_DIRECT on this file system")
    drop_cache(path(store))
    assert cached(path(store)) == 0
    ways.clear()
    assert read_cold(store, 0, NBYTES) == data
    assert set(ways) == {True}
    assert cached(path(store)) == 0
    ways.clear()
    assert read_warm(store, 0, NBYTES) == data
    assert set(ways) == {False}


def test_what_others_read_too_goes_through_the_cache(store, data, ways):
    """A shared range stays where the other ranks find it, and small reads are not worth the device's while."""
    assert read_cold(store, 0, NBYTES, shared=True) == data
    assert read_cold(store, 5, local_source.DIRECT_NBYTES - 1) == data[5 : 4 + local_source.DIRECT_NBYTES]
    assert set(ways) == {False}
    assert cached(path(store)) > 0


def test_a_range_that_is_cached_in_part(store, data, ways):
    """Half of a range in the page cache is not enough; all but one page is."""
    if not takes_direct_reads(path(store)):
        pytest.skip("no O_DIRECT on this file system")
    into = bytearray(NBYTES)
    for hole, way in ((NBYTES // 2, True), (4096, False)):
        path(store).read_bytes()
        with path(store).open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, hole, os.POSIX_FADV_DONTNEED)
        if not 0 < cached(path(store)) < NBYTES:
            pytest.skip("the kernel dropped all or nothing")
        with store.open_source("a/key") as source:
            ways.clear()
            source.read_into(0, memoryview(into))
        assert into == data
        assert set(ways) == {way}


def test_the_page_cache_is_counted(store, data):
    """Whole pages, of the range that is asked about only."""
    drop_cache(path(store))
    assert cached(path(store)) == 0
    path(store).read_bytes()
    assert cached(path(store)) >= NBYTES
    with path(store).open("rb") as opened:
        assert page_cache.cached_nbytes(opened.fileno(), 4096, 8192) == 8192
    assert page_cache.cached_nbytes(-1, 0, 4096) is None


def test_without_cachestat(store, data, monkeypatch, ways):
    """Where nobody says what is cached, the page cache is used."""
    monkeypatch.setattr(page_cache, "_CACHESTAT", None)
    assert read_cold(store, 0, NBYTES) == data
    monkeypatch.setattr(page_cache, "_CACHESTAT", 100_000)  # a number that no kernel has
    assert read_cold(store, 0, NBYTES) == data
    assert set(ways) == {False}


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refused_direct_read_goes_through_the_cache(store, data, monkeypatch, code):
    """Refused at the first read or in the middle of one: every byte comes, is shown once, and it is not tried again."""
    if not takes_direct_reads(path(store)):
        pytest.skip("no O_DIRECT on this file system")
    cached(path(store))
    real, tried = os.preadv, []

    for allowed in (0, 2):

        def preadv(file, views, offset, allowed=allowed):
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                tried.append(offset)
                if len(tried) > allowed:
                    raise OSError(code, os.strerror(code))
            return real(file, views, offset)

        tried.clear()
        with monkeypatch.context() as patch, store.open_source("a/key") as source:
            patch.setattr(os, "preadv", preadv)
            for _ in range(2):
                into, shown = bytearray(NBYTES), bytearray()
                drop_cache(path(store))
                source.read_into(0, memoryview(into), shown.extend)
                assert into == shown == data
        assert len(tried) == allowed + 1


def test_another_error_of_a_direct_read_is_told(store, data, monkeypatch):
    """A failing device is not hidden by a second try."""
    if not takes_direct_reads(path(store)):
        pytest.skip("no O_DIRECT on this file system")
    cached(path(store))

    def preadv(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match="a/key: cannot read: the device reports an I/O error"):
        read_cold(store, 0, NBYTES)


def test_short_direct_reads_are_gone_on_with(store, data, monkeypatch):
    """The system may read less than it was asked for, less than what comes before the range even."""
    real = os.preadv
    for most in (100, 4096, 5000, MIB - 1):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda file, views, offset, most=most: real(file, [views[0][:most]], offset))
            shown = bytearray()
            assert read_cold(store, 4000, 2 * MIB, shown.extend) == shown == data[4000 : 4000 + 2 * MIB]


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT when a file is opened."""
    place = tmp_path / "ramfs"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "ramfs", "ramfs", place], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_file_system_without_direct_reads(ramfs, data):
    """The page cache has it all."""
    store = LocalStore(ramfs / "run")
    store.create("a/key", data)
    assert not takes_direct_reads(path(store))
    assert read_cold(store, 3, NBYTES - 3) == data[3:]


@pytest.mark.parametrize("cut", [0, 1, 4096, 4097, 3 * MIB + 5])
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_is_too_short(store, data, cut, shared):
    """Both ways say where the file ends, and what was expected in it; what was there came."""
    os.truncate(path(store), cut)
    into = bytearray(NBYTES)
    with store.open_source("a/key", shared=shared) as source:
        drop_cache(path(store))
        with pytest.raises(DamagedError, match=rf"a/key: ends after {cut:,} byte.* 7 to {NBYTES + 7:,} are expected"):
            source.read_into(7, memoryview(into))
    assert into[: max(0, cut - 7)] == data[7 : max(7, cut)]


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_shrinks_while_it_is_open(store, data, shared):
    """The size that was found when the file was opened is not believed for ever."""
    with store.open_source("a/key", shared=shared) as source:
        os.truncate(path(store), 2 * MIB)
        drop_cache(path(store))
        with pytest.raises(DamagedError, match=rf"ends after {2 * MIB:,} bytes"):
            source.read_into(0, memoryview(bytearray(NBYTES)))


def test_wrong_questions(store, data):
    """An absent key, a negative offset, memory that cannot be written."""
    with pytest.raises(NotFoundError):
        store.open_source("a/other")
    with pytest.raises(NotFoundError):
        store.open_source("a")
    with store.open_source("a/key") as source:
        with pytest.raises(BadInputError):
            source.read_into(-1, memoryview(bytearray(1)))
        with pytest.raises(BadInputError):
            source.read_into(0, memoryview(b"abc"))


def test_threads_share_a_source(store, data):
    """Eight threads that read ranges of one source each get theirs, cold or not."""
    ends = threading.Barrier(8)

    def read(source, seed: int) -> bool:
        choose = random.Random(seed)
        ends.wait()
        for _ in range(12):
            start = choose.randrange(NBYTES)
            nbytes = min(NBYTES - start, choose.randrange(2 * MIB))
            if choose.random() < 0.3:
                drop_cache(path(store))
            into, shown = bytearray(nbytes), bytearray()
            source.read_into(start, memoryview(into), shown.extend)
            if not into == shown == data[start : start + nbytes]:
                return False
        return True

    with store.open_source("a/key") as source, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda seed: read(source, seed), range(8))) == [True] * 8


def test_no_descriptor_is_lost(store, data, monkeypatch):
    """After good and bad reads, and after openings that failed half-way, as many descriptors are open as before."""
    before = sorted(os.listdir("/proc/self/fd"))
    for shared in (False, True):
        for nbytes in (1, NBYTES, NBYTES + 1):
            with contextlib.suppress(DamagedError), store.open_source("a/key", shared=shared) as source:
                drop_cache(path(store))
                source.read_into(0, memoryview(bytearray(nbytes)))
            source.close()
    for key in ("a/other", "a", "a/key/below"):
        with pytest.raises(NotFoundError):
            store.open_source(key)
    os.symlink("key", path(store, "a/link"))
    os.mkfifo(path(store, "a/fifo"))
    for key in ("a/link", "a/fifo"):
        with pytest.raises(StoreError):
            store.open_source(key)
    real = os.fstat
    calls = []

    def fstat(file):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        store.open_source("a/key").close()
    assert len(calls) == 2
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_was_replaced_between_its_two_openings(store, data, monkeypatch):
    """Both descriptors are of one file; else only the first is used."""
    real = os.open

    def opened(name, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            path(store).unlink()
            path(store).write_bytes(bytes(NBYTES))
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    into = bytearray(NBYTES)
    store.read_into("a/key", 0, memoryview(into))
    assert into == data


def test_a_file_system_in_memory(data):
    """On tmpfs everything is cached, whatever it says of O_DIRECT."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no writable /dev/shm here")
    store = LocalStore(shm / f"ckpt-test-source-{os.getpid()}")
    try:
        store.create("a/key", data)
        assert read_cold(store, 3, NBYTES - 3) == data[3:]
    finally:
        shutil.rmtree(store.root)
