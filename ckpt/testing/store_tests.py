"""The battery that every store must pass. Import it as ``ckpt.testing.StoreTests``."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

from ckpt.errors import AlreadyExistsError, BadInputError, DamagedError, NotFoundError, StoreError
from ckpt.store.base import Store
from ckpt.testing.faults import FaultyStore
from ckpt.testing.racing import compete, key, payload

T = TypeVar("T")

_MIB = 1 << 20
ESCAPES = [
    "", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", ".", "./a", "a/./b", "a//b", "a/", "/a", "a\0b",
    ".hidden", "a/.hidden", "x" * 256, "a/" + "é" * 128, "\ud800",
]  # fmt: skip
ODD_NAMES = [
    "a%2Fb", "%", "%00", "a b", "é", "e\u0301", "日本語", "🙂", "a+b", "a&b=c?d#e", "x[0:512,0:64]", "~", "-rf", "a\\b",
    "'\"`$(x)", "CON", "x" * 255, "a\nb", "a*", "COMMIT", "commit",
]  # fmt: skip


class StoreTests:
    """Subclass it and give a fixture ``store`` that is empty and new for each test.

    ``reopens``: False for a store that ``open_store(store.url)`` does not reach from another process (one in memory).
    ``whole``: False for a store whose storage shows objects while they are created.
    """

    reopens = True
    whole = True

    # -- create, get, size -----------------------------------------------------------------

    def test_what_is_created_is_read(self, store: Store) -> None:
        """The whole object comes back, its size is told, and it exists."""
        store.create("a/b/object", b"payload")
        assert store.get("a/b/object") == b"payload"
        assert store.size("a/b/object") == 7
        assert store.exists("a/b/object") is True

    def test_another_opening_sees_it(self, store: Store) -> None:
        """What one store has written is there for the next one of the same URL, at once."""
        if not self.reopens:
            pytest.skip("not reached by its URL")
        from ckpt.store import open_store

        assert open_store(store.url).list() == []
        store.create("a/b", b"x")
        assert open_store(store.url).get("a/b") == b"x"
        assert open_store(store.url).url == store.url

    def test_create_never_replaces(self, store: Store) -> None:
        """The second create of a key fails and leaves the first one's bytes, and says which key."""
        store.create("a/key", b"first")
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyExistsError, match="a/key"):
                store.create("a/key", data)
        assert store.get("a/key") == b"first"
        assert store.list("a") == ["key"]

    def test_after_delete_a_key_is_free(self, store: Store) -> None:
        """A deleted key can be created again."""
        store.create("a/key", b"first")
        store.delete("a/key")
        store.create("a/key", b"second")
        assert store.get("a/key") == b"second"

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        """No bytes are still an object, by create and by sink."""
        store.create("a/created", b"")
        with store.open_sink("a/sunk"):
            pass
        with store.open_sink("a/announced", 0) as sink:
            sink.write(b"")
        assert store.list("a") == ["announced", "created", "sunk"]
        for name in ("created", "sunk", "announced"):
            assert (store.get(f"a/{name}"), store.size(f"a/{name}")) == (b"", 0)
            store.read_into(f"a/{name}", 0, memoryview(bytearray(0)))
            with pytest.raises(AlreadyExistsError):
                store.create(f"a/{name}", b"x")

    def test_get_refuses_more_than_the_limit(self, store: Store) -> None:
        """An object of exactly the limit is read; one byte more is refused with both sizes."""
        store.create("a/key", b"12345")
        assert store.get("a/key", limit_nbytes=5) == b"12345"
        with pytest.raises(StoreError, match=r"a/key.*5 bytes.*4 bytes"):
            store.get("a/key", limit_nbytes=4)

    def test_twenty_mib(self, store: Store) -> None:
        """A large object comes back bit-exactly by create and by sink, whole and in ranges."""
        data = random.Random(20).randbytes(20 * _MIB + 13)
        store.create("a/created", data)
        with store.open_sink("a/sunk", len(data)) as sink:
            for start in range(0, len(data), 3 * _MIB):
                sink.write(memoryview(data)[start : start + 3 * _MIB])
        for name in ("a/created", "a/sunk"):
            assert store.size(name) == len(data)
            assert store.get(name) == data
            assert _range(store, name, 9 * _MIB + 1, 2 * _MIB) == data[9 * _MIB + 1 : 11 * _MIB + 1]

    # -- read_into -------------------------------------------------------------------------

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 1), (0, 1000), (1, 998), (999, 1), (1000, 0), (500, 7)])
    def test_a_range(self, store: Store, offset: int, nbytes: int) -> None:
        """Any range within the object, its ends included."""
        data = random.Random(1).randbytes(1000)
        store.create("key", data)
        assert _range(store, "key", offset, nbytes) == data[offset : offset + nbytes]

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 1001), (999, 2), (1000, 1), (1001, 0), (5000, 10)])
    def test_a_range_past_the_end_is_damage(self, store: Store, offset: int, nbytes: int) -> None:
        """A range that ends after the object is damage, told with the size there is and the one that was expected."""
        store.create("a/key", bytes(1000))
        with pytest.raises(DamagedError, match=rf"a/key.*1,000 bytes.*{offset + nbytes:,}"):
            _range(store, "a/key", offset, nbytes)

    def test_a_range_touches_its_view_only(self, store: Store) -> None:
        """Reading into a part of a buffer leaves the rest of it alone, also for a view of other items than bytes."""
        store.create("key", bytes(range(1, 9)))
        buffer = bytearray(b"\xff" * 24)
        store.read_into("key", 0, memoryview(buffer)[8:16])
        assert buffer == b"\xff" * 8 + bytes(range(1, 9)) + b"\xff" * 8
        store.read_into("key", 0, memoryview(buffer).cast("I")[:2])
        assert buffer[:8] == bytes(range(1, 9))

    def test_a_range_into_read_only_memory_is_refused(self, store: Store) -> None:
        """A view that cannot be written is an error of the caller, not of the store."""
        store.create("key", b"abc")
        with pytest.raises(BadInputError):
            store.read_into("key", 0, memoryview(b"abc"))
        with pytest.raises(BadInputError):
            store.read_into("key", -1, memoryview(bytearray(1)))

    def test_readers_at_the_same_time(self, store: Store) -> None:
        """Eight threads reading ranges of one object each get theirs."""
        data = random.Random(2).randbytes(4 * _MIB)
        store.create("key", data)

        def read(seed: int) -> bool:
            choose = random.Random(seed)
            spans = [(choose.randrange(len(data)), choose.randrange(70_000)) for _ in range(40)]
            spans = [(start, min(nbytes, len(data) - start)) for start, nbytes in spans]
            return all(_range(store, "key", start, nbytes) == data[start : start + nbytes] for start, nbytes in spans)

        assert _at_once([partial(read, seed) for seed in range(8)]) == [True] * 8

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_source_gives_many_ranges(self, store: Store, shared: bool) -> None:
        """Opened once, read often; what was read is shown in order, once, before the read returns."""
        data = random.Random(3).randbytes(3 * _MIB + 13)
        store.create("a/key", data)
        with store.open_source("a/key", shared=shared) as source:
            for offset, nbytes in ((0, len(data)), (1, 2 * _MIB), (5000, 7), (len(data), 0), (0, 0)):
                into, shown = bytearray(nbytes), bytearray()
                source.read_into(offset, memoryview(into), shown.extend)
                assert into == shown == data[offset : offset + nbytes]
            with pytest.raises(DamagedError, match=rf"a/key.*{len(data):,} bytes.*{len(data) + 1:,}"):
                source.read_into(1, memoryview(bytearray(len(data))))
        source.close()

    def test_a_source_is_read_by_many(self, store: Store) -> None:
        """Eight threads reading ranges through one source each get theirs."""
        data = random.Random(4).randbytes(4 * _MIB)
        store.create("key", data)

        def read(seed: int) -> bool:
            choose = random.Random(seed)
            spans = [(choose.randrange(3 * _MIB), choose.randrange(_MIB)) for _ in range(20)]
            buffers = [bytearray(nbytes) for _, nbytes in spans]
            for (start, _), buffer in zip(spans, buffers, strict=True):
                source.read_into(start, memoryview(buffer))
            return all(buffer == data[a : a + n] for (a, n), buffer in zip(spans, buffers, strict=True))

        with store.open_source("key") as source:
            assert _at_once([partial(read, seed) for seed in range(8)]) == [True] * 8

    def test_a_source_of_what_is_absent(self, store: Store) -> None:
        """Told when it is opened or when it is read: absent, not damaged."""
        with pytest.raises(NotFoundError), store.open_source("a/key") as source:
            source.read_into(0, memoryview(bytearray(1)))

    # -- absent, and not known -------------------------------------------------------------

    def test_absent_is_said_of_what_is_absent(self, store: Store) -> None:
        """Before anything was written, in a folder that is absent, beside and below another object."""
        _assert_absent(store, ["key", "a/key", "a/b/c/key"])
        store.create("a/key", b"x")
        _assert_absent(store, ["key", "a/b/c/key", "a/keys", "a/ke", "a/key/below"])

    def test_a_folder_is_no_object(self, store: Store) -> None:
        """Nothing can be read under a folder's key, and deleting the object of that name removes nothing."""
        store.create("a/b/key", b"x")
        _assert_absent(store, ["a", "a/b"])
        store.delete("a")
        store.delete("a/b")
        assert store.get("a/b/key") == b"x"

    def test_a_failing_store_does_not_say_absent(self, store: Store) -> None:
        """``exists`` of a store that fails is an error, never False."""
        store.create("a/key", b"x")
        failing = FaultyStore(store, errno="EIO")
        with pytest.raises(StoreError, match="a/key"):
            failing.exists("a/key")

    # -- list ------------------------------------------------------------------------------

    def test_a_list_has_names_of_one_level_sorted(self, store: Store) -> None:
        """Objects and folders directly under the prefix, each once, without slashes, in order of their text."""
        assert store.list() == []
        for name in ("b/2", "b/10", "b/1", "b/c/d/deep", "top", "a/x", "bb/y", "b.z"):
            store.create(name, b"")
        assert store.list() == ["a", "b", "b.z", "bb", "top"]
        assert store.list("b") == ["1", "10", "2", "c"]
        assert store.list("b/c") == ["d"]
        assert store.list("b/c/d") == ["deep"]

    def test_a_list_of_nothing_is_empty(self, store: Store) -> None:
        """An absent folder, part of a name, and an object's key have nothing under them."""
        store.create("folder/object", b"x")
        for prefix in ("absent", "absent/below", "fold", "folder/obj", "folder/object", "folder/object/below"):
            assert store.list(prefix) == []

    # -- delete ----------------------------------------------------------------------------

    def test_delete_takes_one_object(self, store: Store) -> None:
        """The object goes, its neighbours stay."""
        for name in ("a/1", "a/10", "a/1b/c"):
            store.create(name, b"x")
        store.delete("a/1")
        assert store.exists("a/1") is False
        assert store.list("a") == ["10", "1b"]

    def test_deleting_what_is_absent_is_no_error(self, store: Store) -> None:
        """Absent objects and folders, also below an object, are deleted without complaint."""
        store.delete("a/b")
        store.delete_folder("a/b")
        store.create("a/object", b"x")
        store.delete("a/b")
        store.delete("a/object/below")
        store.delete_folder("a/b")
        store.delete_folder("a/object")
        store.delete_folder("a/object/below")
        assert store.get("a/object") == b"x"

    def test_delete_folder_takes_all_below_it(self, store: Store) -> None:
        """Everything under the prefix goes, at every depth; a folder whose name only begins alike stays."""
        for name in ("s/1/a", "s/1/b/c/d", "s/1/b/e", "s/10/a", "s/1.x", "other"):
            store.create(name, b"x")
        store.delete_folder("s/1")
        assert store.list("s") == ["1.x", "10"]
        assert store.list("s/1") == []
        assert store.exists("s/1/b/c/d") is False
        assert store.get("other") == b"x"
        store.create("s/1/a", b"again")
        assert store.list("s/1") == ["a"]

    def test_the_root_is_not_deleted(self, store: Store) -> None:
        """``delete_folder("")`` is refused, whatever the store holds."""
        store.create("a/b", b"x")
        with pytest.raises(BadInputError):
            store.delete_folder("")
        assert store.get("a/b") == b"x"

    def test_deleting_at_the_same_time(self, store: Store) -> None:
        """Eight threads may delete the same folder; none fails, nothing is left."""
        for number in range(60):
            store.create(f"a/b/{number % 5}/{number}", b"x")
        _at_once([lambda: store.delete_folder("a/b") for _ in range(8)])
        assert store.list("a/b") == []

    # -- sinks -----------------------------------------------------------------------------

    def test_a_sink_joins_its_writes(self, store: Store) -> None:
        """Writes of all sizes and kinds of memory follow each other in the object."""
        pieces: list[bytes | bytearray | memoryview] = [
            b"",
            b"a",
            bytes(4096),
            bytearray(b"xyz"),
            memoryview(b"0123456789")[2:5],
            b"\xff" * 100_001,
        ]
        with store.open_sink("a/b/key") as sink:
            for piece in pieces:
                sink.write(memoryview(piece))
            sink.write(b"plain bytes")
            sink.write(memoryview(bytearray(8)).cast("I"))
        assert store.get("a/b/key") == b"".join(bytes(piece) for piece in pieces) + b"plain bytes" + bytes(8)

    def test_a_sink_takes_page_aligned_memory(self, store: Store) -> None:
        """Large writes from page-aligned memory, before and after small ones, end up where they belong."""
        nbytes = 6 * _MIB
        with mmap.mmap(-1, nbytes) as memory:
            memory[:] = data = random.Random(3).randbytes(nbytes)
            with memoryview(memory) as view:
                cuts = [0, 4096, 2 * _MIB, 4 * _MIB + 4096, 5 * _MIB + 7, nbytes]
                with store.open_sink("a/key", nbytes) as sink:
                    for start, stop in itertools.pairwise(cuts):
                        sink.write(view[start:stop])
                with store.open_sink("a/readonly", nbytes) as sink:
                    sink.write(view.toreadonly())
        assert store.get("a/key") == data
        assert store.get("a/readonly") == data

    def test_memory_is_free_after_write(self, store: Store) -> None:
        """The caller may change its buffer as soon as ``write`` has returned."""
        with mmap.mmap(-1, 2 * _MIB) as memory, store.open_sink("key") as sink:
            for value in (b"\x01", b"\x02", b"\x03"):
                memory[:] = value * len(memory)
                with memoryview(memory) as view:
                    sink.write(view)
            memory[:] = b"\xff" * len(memory)
        assert store.get("key") == b"\x01" * 2 * _MIB + b"\x02" * 2 * _MIB + b"\x03" * 2 * _MIB

    def test_an_aborted_sink_leaves_nothing(self, store: Store) -> None:
        """By ``abort`` or by an exception in the block: the key is absent and free again."""
        sink = store.open_sink("a/called", 100)
        sink.write(bytes(50))
        sink.abort()
        sink.abort()
        with contextlib.suppress(ZeroDivisionError), store.open_sink("a/raised") as sink:
            sink.write(bytes(2 * _MIB))
            raise ZeroDivisionError
        for name in ("a/called", "a/raised"):
            assert store.exists(name) is False
        assert store.list("a") == []
        store.create("a/called", b"x")

    def test_abort_after_close_removes_nothing(self, store: Store) -> None:
        """A finished object stays, however often its sink is closed or aborted."""
        sink = store.open_sink("a/key")
        sink.write(b"x")
        sink.close()
        sink.close()
        sink.abort()
        assert store.get("a/key") == b"x"

    def test_a_closed_sink_takes_no_more(self, store: Store) -> None:
        """Writing after ``close`` or ``abort`` is an error, and close after abort makes no object."""
        closed, aborted = store.open_sink("a/closed"), store.open_sink("a/aborted")
        closed.close()
        aborted.abort()
        for sink in (closed, aborted):
            with pytest.raises(StoreError):
                sink.write(b"x")
        with contextlib.suppress(StoreError):
            aborted.close()
        assert store.list("a") == ["closed"]

    @pytest.mark.parametrize("written", [0, 9, 11])
    def test_a_sink_holds_to_its_announced_size(self, store: Store, written: int) -> None:
        """An object that is not as large as announced is not made."""
        with pytest.raises(StoreError, match=r"a/key.*10"), store.open_sink("a/key", 10) as sink:
            sink.write(bytes(written))
        assert store.exists("a/key") is False

    def test_a_sink_never_replaces(self, store: Store) -> None:
        """A sink on a key that exists fails when it is opened, or at the latest when it is closed."""
        store.create("a/key", b"first")
        with pytest.raises(AlreadyExistsError, match="a/key"), store.open_sink("a/key") as sink:
            sink.write(b"second")
        assert store.get("a/key") == b"first"
        with store.open_sink("a/other") as sink:
            sink.write(b"first")
        with pytest.raises(AlreadyExistsError, match="a/other"):
            store.create("a/other", b"second")
        assert store.get("a/other") == b"first"

    def test_two_sinks_at_once(self, store: Store) -> None:
        """Sinks on different keys of one folder do not mix."""
        with store.open_sink("a/1") as one, store.open_sink("a/2") as two:
            for _ in range(10):
                one.write(b"1" * 1000)
                two.write(b"2" * 1000)
        assert (store.get("a/1"), store.get("a/2")) == (b"1" * 10_000, b"2" * 10_000)

    # -- keys ------------------------------------------------------------------------------

    @pytest.mark.parametrize("bad", ESCAPES)
    def test_a_key_that_escapes_is_refused(self, store: Store, bad: str) -> None:
        """No verb takes a key that is no clean relative path, and none touches anything."""
        verbs: list[Callable[[str], object]] = [
            *(store.get, store.size, store.exists, store.delete, store.delete_folder, store.open_sink),
            lambda key: store.create(key, b"x"),
            lambda key: _range(store, key, 0, 1),
        ]
        for verb in verbs if bad == "" else [*verbs, store.list]:
            with pytest.raises(BadInputError):
                verb(bad)
        assert store.list() == []

    def test_odd_names_stay_distinct(self, store: Store) -> None:
        """Unicode, percent signs, quotes and the like are names as any other, and nothing is decoded or folded."""
        for number, name in enumerate(ODD_NAMES):
            store.create(f"odd/{name}", b"%d" % number)
            with store.open_sink(f"in/{name}/{name}") as sink:
                sink.write(b"%d" % number)
        assert store.list("odd") == sorted(ODD_NAMES)
        assert store.list("in") == sorted(ODD_NAMES)
        for number, name in enumerate(ODD_NAMES):
            assert store.get(f"odd/{name}") == b"%d" % number
            assert store.list(f"in/{name}") == [name]
            assert store.get(f"in/{name}/{name}") == b"%d" % number

    # -- races -----------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["create", "sink"])
    def test_one_thread_of_sixteen_wins(self, store: Store, way: str) -> None:
        """Of 16 threads that make the same key exactly one succeeds, and the object is that one's, whole."""
        nbytes = 64 << 10
        for number in range(4):
            won = _at_once([partial(compete, store, number, payload(who, nbytes), way) for who in range(16)])
            assert won.count(True) == 1
            assert store.get(key(number)) == payload(won.index(True), nbytes)
        assert store.list("race") == [key(number).rpartition("/")[2] for number in range(4)]

    def test_a_created_object_is_never_torn(self, store: Store) -> None:
        """Who looks on while a large object is created sees nothing, and then all of it."""
        if not self.whole:
            pytest.skip("shows objects that grow")
        data = random.Random(4).randbytes(16 * _MIB)
        seen, done = set(), threading.Event()

        def look() -> None:
            while not done.is_set():
                with contextlib.suppress(NotFoundError):
                    seen.add(store.size("a/key"))

        store.create("a/other", b"x")
        onlooker = threading.Thread(target=look)
        onlooker.start()
        try:
            store.create("a/key", data)
        finally:
            done.set()
            onlooker.join()
        assert seen <= {len(data)}
        assert store.get("a/key") == data

    @pytest.mark.parametrize("way", ["create", "sink"])
    def test_one_process_of_four_wins(self, store: Store, way: str) -> None:
        """The same for processes; and a created object is never seen torn by a reader that looks on."""
        if not self.reopens:
            pytest.skip("not reached by its URL")
        rounds, nbytes = 12, 256 << 10
        command = [sys.executable, "-m", "ckpt.testing.racing", store.url, str(rounds), str(nbytes), way]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with contextlib.ExitStack() as stack:
            racers = [
                stack.enter_context(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
                )
                for _ in range(4)
            ]
            for racer in racers:
                assert racer.stdout is not None
                assert racer.stdout.readline() == "ready\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            torn = 0
            while self.whole and way == "create" and any(racer.poll() is None for racer in racers):
                for number in range(rounds):
                    with contextlib.suppress(NotFoundError):
                        torn += len(set(_words(store.get(key(number)), nbytes))) != 1
            winners: dict[int, list[int]] = {number: [] for number in range(rounds)}
            for racer in racers:
                for number in json.loads(racer.communicate(timeout=60)[0]):
                    winners[number].append(racer.pid)
        assert [len(pids) for pids in winners.values()] == [1] * rounds
        assert torn == 0
        for number, pids in winners.items():
            assert store.get(key(number)) == payload(pids[0], nbytes)


def _assert_absent(store: Store, keys: Sequence[str]) -> None:
    verbs: list[Callable[[str], object]] = [store.get, store.size, lambda key: _range(store, key, 0, 1)]
    for absent in keys:
        for verb in verbs:
            with pytest.raises(NotFoundError, match=absent):
                verb(absent)
        assert store.exists(absent) is False


def _range(store: Store, key: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    store.read_into(key, offset, memoryview(buffer))
    return bytes(buffer)


def _words(data: bytes, nbytes: int) -> Sequence[bytes]:
    """The 16-byte pieces of a racer's object, all alike when it is whole."""
    return [data[start : start + 16] for start in range(0, nbytes, 16)]


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run the calls in as many threads, started together; their results, in order."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait(timeout=30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
