"""Time grows with the size of the input, not with its square: the worst that each parser can be given, in two sizes."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ckpt.errors import CkptError
from ckpt.format import alarms, commit, layout, names, part, records, safetensors, values
from ckpt.keeper import protocol
from ckpt.plan.boxes import LayoutBoxes
from ckpt.plan.files import file_tables
from tests.fuzz.targets import sealed

DIGEST = "0" * 32
TIMES = 8  # larger
ALLOWED = 32  # times as long; what is quadratic takes 64 times as long
LEAST_S = 0.002  # a time that a clock can tell


def _commit(n: int) -> Callable[[], object]:
    parts = [{"name": part.part_name(rank, n), "nbytes": 1, "digest": DIGEST} for rank in range(n)]
    record = {
        "format": "ckpt/1", "step": 1, "attempt": "w1.1", "world": n, "features": [], "written_by": "",
        "created_unix_s": 0,
        "layouts": [{"digest": DIGEST, "nbytes": 1, "ranks": [[rank, rank] for rank in range(n)]}], "parts": parts,
        "files": [],
    }  # fmt: skip
    raw = sealed(json.dumps(record).encode())
    return lambda: commit.decode_commit(raw, "COMMIT")


def _features(n: int) -> Callable[[], object]:
    raw = sealed(json.dumps({"format": "ckpt/1", "features": [f"f{i}" for i in range(n)]}).encode())
    return lambda: commit.decode_commit(raw, "COMMIT")


def _layout(n: int, **change: Any) -> Callable[[], object]:
    row = {
        "group": "state",
        "dtype": "uint8",
        "shape": [4],
        "mesh": 0,
        "placements": ["S0"],
        "owners": [0],
        "kind": "tensor",
    }
    tensors = [{"name": f"t{i}", **row, **{k: v(i) for k, v in change.items()}} for i in range(n)]
    raw = json.dumps(
        {"format": "ckpt/1", "meshes": [{"shape": [2], "ranks": [0, 1]}], "tensors": tensors, "aliases": {}}
    ).encode()
    return lambda: layout.decode_layout(raw, records.digest(raw))


def _nesting(n: int) -> Callable[[], object]:
    """n layouts' worth of one tensor cut along 64 mesh dimensions, half of them strided past the other half."""
    words = ["S0/2"] * 32 + ["S0"] * 32
    row = {"group": "state", "dtype": "uint8", "shape": [64], "mesh": 0, "owners": [0], "kind": "tensor"}
    tensors = [{"name": f"t{i}", **row, "shape": [64 + i], "placements": words, "mesh": i} for i in range(n)]
    meshes = [{"shape": [*[1] * 63, 2], "ranks": [0, 1 + i]} for i in range(n)]
    raw = json.dumps({"format": "ckpt/1", "meshes": meshes, "tensors": tensors, "aliases": {}}).encode()

    def work() -> None:
        layout.nesting.cache_clear()
        layout.decode_layout(raw, records.digest(raw))

    return work


def _mesh(n: int) -> Callable[[], object]:
    """A mesh of n ranks, one tensor cut along it, and the table of one rank."""
    raw = json.dumps({
        "format": "ckpt/1", "meshes": [{"shape": [n], "ranks": list(range(n))}], "aliases": {},
        "tensors": [{"name": "a", "group": "state", "dtype": "uint8", "shape": [n], "mesh": 0, "placements": ["S0"],
        "owners": [0],
                     "kind": "tensor"}],
    }).encode()  # fmt: skip

    def work() -> None:
        found = layout.decode_layout(raw, records.digest(raw))
        file_tables(found, n - 1, (), LayoutBoxes(found))

    return work


def _pieces(n: int) -> Callable[[], object]:
    """As many pieces as replicas, and all shards of them looked for."""
    raw = json.dumps({
        "format": "ckpt/1", "meshes": [{"shape": [n], "ranks": list(range(n))}], "aliases": {},
        "tensors": [{"name": "a", "group": "state", "dtype": "uint8", "shape": [n], "mesh": 0, "placements": ["R"],
                     "owners": list(range(n)), "kind": "tensor"}],
    }).encode()  # fmt: skip

    def work() -> None:
        found = layout.decode_layout(raw, records.digest(raw))
        boxes = LayoutBoxes(found)
        tensor = found.tensors[0]
        list(boxes.holders(tensor, boxes.owned(tensor, 0)[0]))

    return work


def _part(n: int, **fields: Any) -> Callable[[], object]:
    record = {
        "format": "ckpt/1", "step": 1, "attempt": "w1.1", "rank": 0, "world": 1, "layout": DIGEST, "files": [],
        "rank_tensors": [],
        "values": None, "values_digests": {}, "rank_values": {}, **fields,
    }  # fmt: skip
    raw = json.dumps(record).encode()
    return lambda: part.decode_part(raw, "part")


def _file(**fields: Any) -> list[dict[str, Any]]:
    file = {
        "group": "state", "name": "state-00000-of-00001.safetensors", "nbytes": 0, "encoding": "raw",
        "header_nbytes": 8,
        "header_digest": DIGEST, "chunks": [], "packed": [],
    }  # fmt: skip
    return [file | fields]


def _chunks(n: int) -> Callable[[], object]:
    return _part(n, files=_file(chunks=[DIGEST] * n, nbytes=8 + n))


def _packed(n: int) -> Callable[[], object]:
    packed = [[DIGEST, i, 1, "zstd"] for i in range(n)]
    pack = {"encoding": "zstd", "header_nbytes": 0, "header_digest": "", "name": "state-00000-of-00001.pack"}
    return _part(n, files=_file(packed=packed, nbytes=n, **pack))


def _alarms(n: int) -> Callable[[], object]:
    rows = [{"kind": "not finite", "tensor": f"t{i}", "nan": 1} for i in range(n)]
    raw = json.dumps({"format": "ckpt/1", "step": 1, "attempt": "w1.1", "world": 1, "alarms": rows}).encode()
    return lambda: alarms.decode_alarms(raw, "alarms")


def _header(n: int) -> Callable[[], object]:
    entries = [safetensors.HeaderEntry(f"t{i}", "U8", (), 1) for i in range(n)]
    raw = safetensors.build_header(entries, {})
    return lambda: safetensors.parse_header(raw, len(raw) + n, "file")


def _long_key(n: int) -> Callable[[], object]:
    raw = safetensors.build_header([safetensors.HeaderEntry("k" * n, "U8", (), 1)], {})
    return lambda: safetensors.parse_header(raw, len(raw), "file")


def _value(make: Callable[[int], Any]) -> Callable[[int], Callable[[], object]]:
    def at(n: int) -> Callable[[], object]:
        node = make(n)
        return lambda: values.decode(node, "value")

    return at


def _colliding(n: int) -> list[Any]:
    return [{"t": "int", "v": hex((2**61 - 1) * i)} for i in range(1, n + 1)]


def _deep(n: int) -> Any:
    """n lists on 190 levels."""
    node: Any = [0] * n
    for _ in range(150):
        node = [node]
    return node


def _name(make: Callable[[int], str]) -> Callable[[int], Callable[[], object]]:
    def at(n: int) -> Callable[[], object]:
        text = make(n)
        return lambda: names.is_name(text)

    return at


def _tiny_frames(n: int) -> Callable[[], object]:
    stream = protocol.pack(protocol.StatusRequest(1)) * n

    def work() -> None:
        buffer = protocol.FrameBuffer()
        for start in range(0, len(stream), 1 << 20):
            buffer.feed(stream[start : start + (1 << 20)])
            while (body := buffer.frame()) is not None:
                protocol.message_of(body, protocol.from_client)

    return work


def _one_frame_in_pieces(n: int) -> Callable[[], object]:
    """n pieces of 100 bytes until the frame is whole."""
    body = msgspec.msgpack.encode(b"x" * (100 * n))
    stream = len(body).to_bytes(4, "big") + body

    def work() -> None:
        buffer = protocol.FrameBuffer(limit_nbytes=protocol.FRAME_LIMIT_NBYTES)
        for start in range(0, len(stream), 100):
            buffer.feed(stream[start : start + 100])
            buffer.frame()

    return work


WORST: dict[str, tuple[int, Callable[[int], Callable[[], object]]]] = {
    "COMMIT of many ranks": (3000, _commit),
    "COMMIT with many features": (6000, _features),
    "layout with many tensors": (2000, _layout),
    "layout, no two alike": (2000, lambda n: _layout(n, shape=lambda i: [4 + i])),
    "layout of 64 mesh dimensions": (300, _nesting),
    "layout with a long mesh": (20_000, _mesh),
    "layout with many pieces": (6000, _pieces),
    "part with many chunks": (20_000, _chunks),
    "part with many packed chunks": (5000, _packed),
    "many alarms": (5000, _alarms),
    "header with many tensors": (3000, _header),
    "header with a long key": (300_000, _long_key),
    "value: many items": (20_000, _value(lambda n: [0.5] * n)),
    "value: many items, deep": (3000, _value(_deep)),
    "value: keys of one hash": (20_000, _value(lambda n: {"t": "dict", "v": [x for key in _colliding(n) for x in (key,
    0)]})),
    "value: items of one hash": (20_000, _value(lambda n: {"t": "set", "v": _colliding(n)})),
    "value: a long int": (1_000_000, _value(lambda n: {"t": "int", "v": "0x" + "f" * n})),
    "name: many components": (8000, _name(lambda n: ".".join(["a%2E"] * n))),
    "name: a tuple that does not end": (10_000, _name(lambda n: "%(" + "a%," * n)),
    "name: a tuple": (10_000, _name(lambda n: "%(" + "%,".join(["a"] * n) + "%)")),
    "name: tuples in tuples": (3000, _name(lambda n: "%(" * 20 + "a%," * n + "a" + "%)" * 20)),
    "name: a long number": (200_000, _name(lambda n: "%i0x" + "f" * n)),
    "frames: many": (20_000, _tiny_frames),
    "frames: one in pieces": (10_000, _one_frame_in_pieces),
}  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    """The least of some runs, of this thread's own processor time."""
    found = []
    gc.collect()
    gc.disable()  # it looks at all objects of all tests before this one
    try:
        for _ in range(3):
            started = time.thread_time()
            with contextlib.suppress(CkptError):
                work()
            found.append(time.thread_time() - started)
    finally:
        gc.enable()
    return min(found)


@pytest.mark.parametrize("name", WORST)
def test_time_grows_with_the_input(name: str):
    """Eight times the input takes about eight times as long, whether it is accepted or refused."""
    n, make = WORST[name]
    small, large = _seconds(make(n)), _seconds(make(n * TIMES))
    assert large < max(LEAST_S, small) * ALLOWED, f"{n}: {small:.3f} s, {n * TIMES}: {large:.3f} s"
