"""The table of parsers that read what others wrote, each with seeds and what must hold of whatever it accepts.

A target takes any bytes and raises nothing but CkptErrors. A new parser is one more entry here: ``make fuzz``,
the property
tests and the corpus's regression test go by the table.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ckpt.errors import CkptError, KeeperError
from ckpt.format import (
    alarms,
    chunk,
    commit,
    hold,
    layout,
    metrics,
    names,
    parity,
    part,
    records,
    safetensors,
    values,
    writer,
)
from ckpt.keeper import persist, protocol
from ckpt.keeper.connection import Connection
from ckpt.reading.tree import leaves, readable, without_torch
from tests.fuzz.mutations import Choose, json_mutated, msgpack_mutated

GOLDEN = Path(__file__).parent.parent / "golden"
SEED_LIMIT_NBYTES = 4096
ATTEMPT = commit.Attempt(300, 7, 3)
SECRET = b"s" * 32

Mutate = Callable[[bytes, Choose], bytes]


class Target(msgspec.Struct, frozen=True):
    """One parser. ``mutate`` alters a seed and leaves its form; ``head`` bytes before it choose how it is read."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate = json_mutated
    head: int = 0


def mutate(target: Target, raw: bytes, choose: Choose) -> bytes:
    """``raw`` altered as its form allows; what has none is altered byte by byte."""
    head, body = raw[: target.head], raw[target.head :]
    try:
        return head + target.mutate(body, choose)
    except (ValueError, RecursionError):
        return bytes_mutated(raw, choose)


def bytes_mutated(raw: bytes, choose: Choose) -> bytes:
    """One byte changed, some cut out, or some repeated."""
    at = choose(len(raw) + 1)
    match choose(4):
        case 0:
            return raw[:at] + bytes([choose(256)]) + raw[at + 1 :]
        case 1:
            return raw[:at] + raw[at + 1 + choose(8) :]
        case 2:
            return raw[:at] + raw[max(0, at - 1 - choose(8)) :]
        case _:
            return raw[:at]


# -- records -----------------------------------------------------------------------------------


def sealed(line: bytes) -> bytes:
    """COMMIT's two lines."""
    return line + b"\n" + records.digest(line).encode() + b"\n"


def _round_trip(record: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
    """What was accepted can be written, and is read as the same again."""
    assert decode(encode(record)) == record


def read_commit(raw: bytes) -> None:
    """COMMIT: sealed for the fuzzer, which finds no digest by itself; what begins with a zero is taken as it is."""
    raw = raw[1:] if raw[:1] == b"\0" else sealed(raw)
    _round_trip(
        commit.decode_commit(raw, "COMMIT"), commit.encode_commit, lambda raw: commit.decode_commit(raw, "COMMIT")
    )


def read_layout(raw: bytes) -> None:
    """A layout, by its right digest; and the arithmetic on it."""
    from ckpt.plan.boxes import LayoutBoxes
    from ckpt.plan.files import file_tables

    found = layout.decode_layout(raw, records.digest(raw))
    digest, again = layout.encode_layout(found)
    assert layout.decode_layout(again, digest) == found
    refs = [commit.LayoutRef(digest, len(again), ((0, 3),))]
    boxes = LayoutBoxes(found)
    for rank in range(4):
        file_tables(found, rank, (), boxes)
    commit.check_step(refs, 4, {digest: found}, "COMMIT")


def read_part(raw: bytes) -> None:
    """A part, and its values as every reader decodes them."""
    found = part.decode_part(raw, "part")
    _round_trip(found, part.encode_part, lambda raw: part.decode_part(raw, "part"))
    for tree in (found.values or {}, found.rank_values):
        for key, node in tree.items():
            values.decode(without_torch(node), key)


def _record(encode: Callable[[Any], bytes], decode: Callable[[bytes, str], Any]) -> Callable[[bytes], None]:
    def read(raw: bytes) -> None:
        found = decode(raw, "record")
        assert decode(encode(found), "record") == found

    return read


def read_metrics(raw: bytes) -> None:
    """Metrics of the attempt that the seeds are of."""
    found = metrics.decode_metrics(raw, ATTEMPT, "metrics.json")
    again = metrics.decode_metrics(metrics.encode_metrics(ATTEMPT, found), ATTEMPT, "metrics.json")
    assert repr(again) == repr(dict(sorted(found.items())))


def read_names_of_files(raw: bytes) -> None:
    """The names of a run's files: what is taken for one is written the same."""
    text = raw.decode("utf-8", "surrogateescape")
    attempt = commit.parse_folder(text)
    assert attempt is None or attempt.folder == text
    number = writer.parse_writer_name(text)
    assert number is None or writer.writer_key(number).endswith(f"/{text}")
    found = parity.parse_record_name(text)
    assert found is None or parity.record_name(*found) == text
    hold.parse_hold_name(text)
    records.parse_label(text)


# -- safetensors, values, names, chunks -----------------------------------------------------------


def read_header(raw: bytes) -> None:
    """A safetensors header: its length is put before it; the payload is as long as the first two bytes say."""
    if len(raw) < 2:
        safetensors.parse_header(raw, len(raw), "file")
        return
    if raw[0] == 0xFF:
        safetensors.parse_header(raw[2:], len(raw) - 2 + raw[1], "file")
        return
    text = raw[2:]
    nbytes = 8 + len(text) + int.from_bytes(raw[:2], "big")
    _, entries = safetensors.parse_header(struct.pack("<Q", len(text)) + text, nbytes, "file")
    assert sum(entry.end - entry.begin for entry in entries) == int.from_bytes(raw[:2], "big")


def read_value(raw: bytes) -> None:
    """A value, with torch's types and without; what comes out can be shown, and encodes to the node it came from."""
    try:
        node = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return  # records.decode says so of the record around it
    plain: Any = values.decode(without_torch(node), "value")
    json.dumps(readable(plain), allow_nan=False)
    leaves(plain, "value")
    tree = values.decode(node, "value")
    again = values.encode(tree, "value")
    assert values.encode(values.decode(again, "value"), "value") == again


def read_name(raw: bytes) -> None:
    """A name: it splits into the path that makes it."""
    # Lone surrogates can stand in a str that came from JSON escapes; here they come as what no UTF-8 has.
    text = raw.decode("utf-8", "surrogateescape")
    try:
        path = names.split_name(text)
    except CkptError:
        assert not names.is_name(text)
        raise
    assert names.is_name(text)
    assert names.join_name(path) == text


def read_chunk(raw: bytes) -> None:
    """A stored chunk: the first three bytes say how many bytes it should have, the fourth how it is encoded."""
    nbytes = int.from_bytes(raw[:3], "big")
    encoding = ("raw", "zstd", "lz4")[raw[3] % 3] if len(raw) > 3 else "zstd"
    assert len(chunk.decode_chunk(raw[4:], encoding, nbytes)) == nbytes


# -- the keeper ----------------------------------------------------------------------------------


def _frames(raw: bytes) -> Iterator[bytes]:
    """The frames in a stream that arrives in pieces of the first byte's size."""
    buffer = protocol.FrameBuffer(limit_nbytes=1 << 16)
    step = max(1, raw[0]) if raw else 1
    greeted = False
    for start in range(1, len(raw), step):
        buffer.feed(raw[start : start + step])
        if not greeted:
            line = buffer.line()
            if line is None:
                continue
            greeted = True
        while (body := buffer.frame()) is not None:
            yield body


def read_frames_from_client(raw: bytes) -> None:
    """What a keeper hears; and what it makes of a task."""
    layouts: dict[str, bytes] = {}
    for body in _frames(raw):
        message = protocol.message_of(body, protocol.from_client)
        assert protocol.message_of(protocol.pack(message)[4:], protocol.from_client) == message or "nan" in repr(
            message
        )
        if isinstance(message, protocol.Begin):
            layouts = _take_task(message.task, layouts)


def read_frames_from_keeper(raw: bytes) -> None:
    """What a client hears."""
    for body in _frames(raw):
        message = protocol.message_of(body, protocol.from_keeper)
        assert protocol.message_of(protocol.pack(message)[4:], protocol.from_keeper) == message or "nan" in repr(
            message
        )


def _take_task(task: protocol.SaveTask, layouts: dict[str, bytes]) -> dict[str, bytes]:
    whole, layouts = protocol.whole(task, layouts)
    persist.check_task(whole, 1 << 20)
    end = protocol.arena_end(whole)
    assert 0 <= end <= 1 << 20
    assert persist.attempt_of(whole).folder.startswith("step-")
    return layouts


def read_task(raw: bytes) -> None:
    """A task alone, as msgpack."""
    try:
        task = msgspec.msgpack.decode(raw, type=protocol.SaveTask)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise KeeperError(str(error)) from None
    _take_task(task, {"a" * 32: b"layout"})


def hear(raw: bytes) -> None:
    """A connection: what comes before the proof and, when the first byte is odd, what comes after it."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(1, ours)
        try:
            if raw[:1] and raw[0] % 2:
                connection.welcome = connection._greeted = True
                connection._frames.limit_nbytes = protocol.FRAME_LIMIT_NBYTES
            theirs.sendall(raw[1:65537])
            theirs.shutdown(socket.SHUT_WR)
            messages = connection.receive(SECRET, "job")
            assert connection.welcome or not messages, "a message of someone who has proved nothing"
        finally:
            connection.close()


# -- seeds -----------------------------------------------------------------------------------------


def _files(pattern: str) -> list[bytes]:
    found = (path.read_bytes() for path in sorted(GOLDEN.glob(pattern)))
    return [raw for raw in found if len(raw) <= SEED_LIMIT_NBYTES]


def _commits() -> list[bytes]:
    return [raw.split(b"\n")[0] for raw in _files("*/step-*/COMMIT")] + [
        b"\0" + raw for raw in _files("*/step-*/COMMIT")
    ]


def _layouts() -> list[bytes]:
    mesh = layout.Mesh((2,), (0, 1))
    cube = layout.Mesh((2, 1, 2), (3, 1, 2, 0))
    tensor = layout.Tensor("model.w", "model", "float32", (4, 3), 0, ("S0",), (0,))
    made = layout.Layout(
        records.FORMAT,
        (mesh, cube),
        (
            tensor,
            layout.Tensor("optimizer.m", "optimizer", "bfloat16", (6, 2), 0, ("R",), (0, 1)),
            layout.Tensor("x.%i3", "state", "int64", (), 0, ("R",), (1,), "ndarray"),
            layout.Tensor("y", "state", "uint8", (8, 0), 1, ("S0/2", "R", "S0"), (0,)),
            layout.Tensor("z", "state", "complex64", (8,), 1, ("R", "S0", "R"), ()),
        ),
        {"model.tied": "model.w"},
    )
    return [layout.encode_layout(made)[1], *_files("*/layouts/*.json")]


def _parts() -> list[bytes]:
    digest = "d" * 32
    raw = part.DataFile("model", "model-00000-of-00002.safetensors", 4196, "raw", 4096, digest, (digest,))
    pack = part.DataFile(
        "state", "state-00000-of-00002.pack", 30, "zstd", 0, "", (),
        (part.PackedChunk(digest, 0, 10, "zstd"), part.PackedChunk(digest, 10, 20, "raw")),
    )  # fmt: skip
    found = alarms.Alarm("not finite", "model.w", 2, 1, 0, ((0, 0),))
    made = part.Part(
        records.FORMAT, 300, "w7.3", 0, 2, digest, (raw, pack), (part.RankTensor("rng.s", "uint8", (5,)),),
        {"epoch": 3, "state": {"t": "dict", "v": ["a", [1, 2]]}}, {"epoch": digest}, {"rng": {"t": "tuple", "v": [1]}},
        (found,),
    )  # fmt: skip
    return [part.encode_part(made), *_files("*/step-*/part-*.json")]


def _writers() -> list[bytes]:
    rollback = writer.Writer(records.FORMAT, 8, "n", "rollback by x", "h", 1, 0, 200, 1.5)
    return [writer.encode_writer(rollback), *_files("*/writers/*.json")]


def _parities() -> list[bytes]:
    members = (
        parity.Member(0, "model-00000-of-00002.safetensors", 100),
        parity.Member(1, "state-00001-of-00002.pack", 7),
    )
    name = parity.xor_name(0, 2)
    made = parity.Parity(records.FORMAT, 300, "w7.3", 2, members, name, 100, ("0" * 32,))
    return [parity.encode_parity(made)]


def _alarms() -> list[bytes]:
    rows = (alarms.Alarm("unchanged", "model.w", nbytes=48), alarms.Alarm("replicas", "b", ranks=((0, 0), (2, 3))))
    return [alarms.encode_alarms(alarms.Alarms(records.FORMAT, 300, "w7.3", 4, rows))]


def _metrics() -> list[bytes]:
    return [metrics.encode_metrics(ATTEMPT, {"val_loss": 0.5, "n": 3, "bad": float("nan")})]


def _holds() -> list[bytes]:
    return [hold.encode_hold(hold.Hold(records.FORMAT, ATTEMPT.folder, "node", 7, "boot.1.7.99", 100.0, 200.0))]


def _file_names() -> list[bytes]:
    texts = (
        "step-00000300-w7.3",
        "000007.json",
        "parity-00000-of-00016.json",
        "w7.3",
        "step-00000300-w7.3.0123456789abcdef.json",
    )
    return [text.encode() for text in texts]


def _headers() -> list[bytes]:
    entries = [
        safetensors.HeaderEntry("w", "F32", (2, 3), 24),
        safetensors.HeaderEntry("b[0:1]", "BF16", (1,), 2),
        safetensors.HeaderEntry("e", "U8", (0, 9), 0),
    ]
    header = safetensors.build_header(entries, {"format": "pt"}, align=8)
    return [b"\0\x1a" + header[8:], b"\xff\x1a" + header]


def _values() -> list[bytes]:
    found: list[bytes] = []
    for raw in _parts():
        document = json.loads(raw)
        for node in [*(document["values"] or {}).values(), *document["rank_values"].values()]:
            found += [json.dumps(node, separators=(",", ":")).encode()]
    made = [
        {"t": tag, "v": v}
        for tag, v in (
            ("int", "0x20000000000000"), ("float", "nan:7ff8000000000001"), ("complex", [{"t": "float", "v": "inf"},
            0.5]),
            ("str", "7aCA"), ("bytearray", "AAE="), ("frozenset", [1, "a"]), ("range", [0, 9, 2]), ("slice", [None, 3,
            None]),
            ("date", "2024-02-29"), ("timedelta", [1, 2, 3]), ("numpy.str", "x"), ("numpy.bytes", "AA=="),
            ("torch.dtype", "float32"),
            ("torch.Size", [2, 3]), ("torch.device", "cuda:1"), ("Counter", ["a", 2]), ("OrderedDict", [{"t": "tuple",
            "v": [1]}, []]),
        )
    ]  # fmt: skip
    made += [
        {"t": "deque", "maxlen": 3, "v": [1]}, {"t": "defaultdict", "factory": "list", "v": [True, [0.5]]},
        {"t": "datetime", "v": "2024-02-29T00:00:00", "fold": 1, "zone": [{"t": "timedelta", "v": [0, 3600, 0]},
        "CET"]},
        {"t": "numpy", "dtype": "<M8[s]", "v": "AAAAAAAAAAA="}, {"t": "tensor", "name": "a"}, {"t": "rank", "key": "a"},
        {"t": "module", "prefix": "model", "extra": ["", 1]},
        {"t": "optimizer", "prefix": "o", "groups": [{"t": "dict", "v": ["params", ["w"], "lr", 0.1]}],
         "state": ["w", {"t": "dict", "v": ["step", 1]}]},
    ]  # fmt: skip
    found += [json.dumps(node, separators=(",", ":")).encode() for node in made]
    return [raw for raw in dict.fromkeys(found) if len(raw) <= SEED_LIMIT_NBYTES]


def _names() -> list[bytes]:
    paths: list[tuple[Any, ...]] = [
        ("layers", "0", "weight"), ("a.b", "[", "%", ""), (1, -3, 2**70, 0.5, float("nan"), True, None, b"\0\xff"),
        (("a", 1, ("b", ())), "__metadata__"), ("\ud800",),
    ]  # fmt: skip
    return [names.join_name(path).encode() for path in paths]


def _chunks() -> list[bytes]:
    data = b"abc" * 40
    frame = chunk.encode_zstd(data)
    assert frame is not None
    size = len(data).to_bytes(3, "big")
    lies = chunk.encode_zstd(bytes(1 << 20)) or b""
    return [size + b"\0" + data, size + b"\x01" + frame, b"\x10\0\0\x01" + lies, size + b"\x01" + lies]


def a_task(**change: Any) -> protocol.SaveTask:
    """A task that a keeper takes, but for what ``change`` says."""
    file = protocol.FileTask("model", "model-00000-of-00002.safetensors", 4096, 10, 4, (6,))
    task = protocol.SaveTask(
        run="/r", step=1, writer=2, save=3, rank=0, world=2, arena=4, encode="raw", files=(file,), layout="a" * 32,
        rank_tensors=(part.RankTensor("x", "int8", (2,)),), values={"a": [1, {"t": "float", "v": "0x1p0"}, None]},
        values_digests={"a": "b"}, rank_values={"r": True}, layouts=(protocol.LayoutTask("a" * 32, b"\0\xff", ((0,
        1),)),),
        hf_index=b"{}", max_write_mbps=5.5,
    )  # fmt: skip
    return msgspec.structs.replace(task, **change)


def _stream(*messages: msgspec.Struct) -> bytes:
    return b"".join(map(protocol.pack, messages))


def _from_client() -> list[bytes]:
    said = _stream(
        protocol.Hello(b"n" * 16), protocol.Answer(b"p", 3), protocol.ArenaRequest(1, "/r", 9), protocol.Begin(1,
        a_task()),
        protocol.Ready(1, 9), protocol.Abandon("/r", 1, 2, 3, 0, 1, "why"), protocol.ArenaRelease(2),
        protocol.StatusRequest(7),
        protocol.Bye(done=False),
    )  # fmt: skip
    return [b"\x07" + protocol.PREAMBLE + said, b"\xff" + protocol.PREAMBLE + said]


def _from_keeper() -> list[bytes]:
    result = protocol.SaveResult(1, "w7.3", 9, 0.5, 0.1, ("note",))
    said = _stream(
        protocol.Challenge(b"n" * 16, b"p" * 64), protocol.Welcome(7, "job"), protocol.ArenaGrant(1, 2, 3, (2,)),
        protocol.Staged(1), protocol.Saved(1, result), protocol.Failed(0, "KeeperError", "why"),
    )  # fmt: skip
    return [b"\x07" + protocol.PREAMBLE + said, b"\xff" + protocol.PREAMBLE + said]


def _tasks() -> list[bytes]:
    return [msgspec.msgpack.encode(a_task())]


def _connections() -> list[bytes]:
    hello = protocol.PREAMBLE + _stream(protocol.Hello(b"n" * 16), protocol.Answer(b"p" * 64, 0))
    after = _stream(protocol.ArenaRequest(1, "/r", 9), protocol.Begin(1, a_task()), protocol.Bye(done=True))
    return [b"\0" + hello, b"\x01" + after]


def frames_mutated(raw: bytes, choose: Choose) -> bytes:
    """A stream of frames with one of them altered inside, its length told right."""
    line_end = raw.find(b"\n") + 1
    line, rest = raw[:line_end], raw[line_end:]
    bodies: list[bytes] = []
    while len(rest) >= 4:
        length = int.from_bytes(rest[:4], "big")
        bodies.append(rest[4 : 4 + length])
        rest = rest[4 + length :]
    if not bodies:
        raise ValueError("no frames")
    at = choose(len(bodies))
    bodies[at] = msgpack_mutated(bodies[at], choose)
    return line + b"".join(len(body).to_bytes(4, "big") + body for body in bodies) + rest


TARGETS: dict[str, Target] = {
    "commit": Target(read_commit, _commits),
    "layout": Target(read_layout, _layouts),
    "part": Target(read_part, _parts),
    "writer": Target(_record(writer.encode_writer, writer.decode_writer), _writers),
    "parity": Target(_record(parity.encode_parity, parity.decode_parity), _parities),
    "alarms": Target(_record(alarms.encode_alarms, alarms.decode_alarms), _alarms),
    "metrics": Target(read_metrics, _metrics),
    "hold": Target(_record(hold.encode_hold, hold.decode_hold), _holds),
    "file_names": Target(read_names_of_files, _file_names, bytes_mutated),
    "safetensors": Target(read_header, _headers, head=2),
    "values": Target(read_value, _values),
    "names": Target(read_name, _names, bytes_mutated),
    "chunk": Target(read_chunk, _chunks, bytes_mutated, head=4),
    "frames_from_client": Target(read_frames_from_client, _from_client, frames_mutated, head=1),
    "frames_from_keeper": Target(read_frames_from_keeper, _from_keeper, frames_mutated, head=1),
    "task": Target(read_task, _tasks, msgpack_mutated),
    "connection": Target(hear, _connections, frames_mutated, head=1),
}


def attempt(target: Target, raw: bytes) -> str:
    """Run a target; what it said ("" when it accepted). Anything that is no CkptError goes through: a finding."""
    try:
        target.run(raw)
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""
