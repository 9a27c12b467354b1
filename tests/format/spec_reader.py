"""A reader of ckpt/1 written from SPEC.md alone: it imports nothing of ckpt. Slow, strict, local folders only.

step = read_step(Path("RUN"))        # the newest live step; or read_step(run, 300)
step.tensors["model.layers.0.weight"]  # ("float32", (512, 64), b"...")
"""

from __future__ import annotations

import base64
import json
import re
import struct
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import xxhash
import zstandard

CHUNK = 16 * 1024 * 1024
FEATURES = {"zstd", "alarms"}
NBYTES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 uint1"
    " uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 bits1x8 bits2x4 bits4x2 bits8",
    2: "uint16 int16 float16 bfloat16 bits16", 4: "uint32 int32 float32 complex32", 8: "uint64 int64 float64 complex64",
    16: "complex128",
}  # fmt: skip
ITEM = {dtype: nbytes for nbytes, dtypes in NBYTES.items() for dtype in dtypes.split()}
ST = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip

Json = dict[str, Any]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, row-major bytes


class RefusedError(Exception):
    """Damaged, or of another version."""


@dataclass
class Step:
    """What a step holds. ``values`` and ``tensors`` are of all ranks together, ``rank_*`` one per rank."""

    number: int
    attempt: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: list[Json] = field(default_factory=list)  # one per layout
    rank_tensors: list[dict[str, Tensor]] = field(default_factory=list)
    rank_values: list[Json] = field(default_factory=list)


def need(true: object, why: str) -> None:
    if not true:
        raise RefusedError(why)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def record(raw: bytes) -> Json:
    def unique(pairs: list[tuple[str, Any]]) -> Json:
        need(len({key for key, _ in pairs}) == len(pairs), "a field twice")
        return dict(pairs)

    found: Json = json.loads(raw.decode(), object_pairs_hook=unique)
    need(found.get("format") == "ckpt/1", f"format {found.get('format')!r}")
    return found


# ---------------------------------------------------------------- which attempt


def read_commit(folder: Path) -> Json | None:
    """The attempt's COMMIT; None when there is none, or it is torn."""
    try:
        line, digest_line, end = (folder / "COMMIT").read_bytes().split(b"\n")
    except (FileNotFoundError, ValueError):
        return None
    if digest_line.decode() != digest(line) or end:
        return None
    commit = record(line)
    need(set(commit["features"]) <= FEATURES, f"features {commit['features']}, written by {commit['written_by']}")
    label = folder.name.split("-")[2]
    need((commit["step"], commit["attempt"]) == (int(folder.name.split("-")[1]), label), "COMMIT of another attempt")
    return commit


def writer_record(raw: bytes) -> Json:
    head, _, tail = raw.rpartition(b',"digest":')
    if not head:
        return record(raw)  # of an early version
    need(json.loads(tail.removesuffix(b"}")) == digest(head + b"}"), "an altered writer record")
    return record(head + b"}")


def live_steps(run: Path) -> dict[int, tuple[Path, Json]]:
    writers = sorted(
        (writer_record(path.read_bytes()) for path in (run / "writers").iterdir()), key=lambda w: -w["number"]
    )
    cutoff: float = float("inf")
    limits = {}
    for writer in writers:
        limits[writer["number"]] = cutoff
        cutoff = min(cutoff, -1 if writer["resumed_from"] is None else writer["resumed_from"])
    attempts = []
    for folder in run.iterdir():
        match = re.fullmatch(r"step-([0-9]{8,})-w([0-9]+)\.([0-9]+)", folder.name)
        if match:
            attempts.append((int(match[1]), int(match[2]), int(match[3]), folder))
    live = {}
    for step, writer_number, _, folder in sorted(attempts):  # of one step the newest attempt comes last
        if writer_number in limits and step <= limits[writer_number] and (commit := read_commit(folder)):
            live[step] = (folder, commit)
    return live


# ---------------------------------------------------------------- where the bytes lie


def cut(length: int, pieces: int, index: int) -> tuple[int, int]:
    size = -(-length // pieces)
    return min(index * size, length), min((index + 1) * size, length)


def nesting(mesh_shape: list[int], placements: list[str]) -> list[tuple[int, int]]:
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        match = re.fullmatch(r"R|S(\d+)(?:/(\d+))?", placements[axis])
        assert match is not None
        if match[1] is None:
            continue
        order = orders.setdefault(int(match[1]), [])
        place = 0
        while prod(mesh_shape[a] for a in order[:place]) != int(match[2] or 1):
            place += 1
            need(place <= len(order), f"placements {placements}")
        order.insert(place, axis)
    return [(axis, dimension) for dimension in orders for axis in orders[dimension]]


def owned(layout: Json, tensor: Json, rank: int) -> list[Box]:
    """The boxes of a tensor that a rank of the layout writes."""
    mesh = layout["meshes"][tensor["mesh"]]
    shape, owners = tensor["shape"], tensor["owners"]
    if not owners or rank not in mesh["ranks"]:
        return []
    place, coordinate = mesh["ranks"].index(rank), []
    for side in reversed(mesh["shape"]):
        coordinate.insert(0, place % side)
        place //= side
    replica = 0
    for side, word, at in zip(mesh["shape"], tensor["placements"], coordinate, strict=True):
        replica = replica * side + at if word == "R" else replica
    order = nesting(mesh["shape"], tensor["placements"])
    if prod(shape) == 0:
        first = all(coordinate[axis] == 0 for axis, _ in order) and replica == owners[0]
        return [((0,) * len(shape), tuple(shape))] if first else []
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, dimension in order:
        start, stop = cut(sizes[dimension], mesh["shape"][axis], coordinate[axis])
        offsets[dimension], sizes[dimension] = offsets[dimension] + start, stop - start
    boxes = []
    for index, owner in enumerate(owners):
        if owner != replica:
            continue
        start, stop = cut(sizes[0], len(owners), index) if sizes and len(owners) > 1 else (0, sizes[0] if sizes else 1)
        box = (offsets[0] + start, *offsets[1:]) if sizes else (), (stop - start, *sizes[1:]) if sizes else ()
        if prod(box[1]):
            boxes.append(box)
    return boxes


def file_table(layout: Json, part: Json, group: str) -> list[tuple[str, str, list[int], Box]]:
    """(name, dtype, shape, box) of each shard in a rank's file of a group, in file order."""
    entries = []
    for tensor in layout["tensors"]:
        if tensor["group"] == group:
            boxes = owned(layout, tensor, part["rank"])
            entries += [(tensor["name"], tensor["dtype"], tensor["shape"], box) for box in boxes]
    if group == "state":
        wholes = [(own, ((0,) * len(own["shape"]), tuple(own["shape"]))) for own in part["rank_tensors"]]
        entries += [(own["name"], own["dtype"], own["shape"], box) for own, box in wholes]

    def order(entry: tuple[str, str, list[int], Box]) -> tuple[int, int]:
        nbytes = prod(entry[3][1]) * ITEM[entry[1]]
        return (0, 0) if nbytes and nbytes % 4096 == 0 else (1, -ITEM[entry[1]])

    return sorted(entries, key=order)


# ---------------------------------------------------------------- the bytes


def read_shards(folder: Path, file: Json, sizes: list[int]) -> list[bytes]:
    """The raw bytes of each shard of a data file, every chunk checked."""
    raw = (folder / file["name"]).read_bytes()
    need(len(raw) == file["nbytes"], f"{file['name']}: {len(raw)} bytes")
    spans = [[min(CHUNK, size - at) for at in range(0, size, CHUNK)] for size in sizes]
    digests, at, shards = iter(file["chunks"] or file["packed"]), file["header_nbytes"], []
    need(len(file["chunks"]) + len(file["packed"]) == sum(map(len, spans)), f"{file['name']}: number of chunks")
    if file["encoding"] == "raw":
        need(digest(raw[:at]) == file["header_digest"], f"{file['name']}: header")
    for chunks in spans:
        shard = b""
        for nbytes in chunks:
            if file["encoding"] == "raw":
                expected, chunk = next(digests), raw[at : at + nbytes]
                at += nbytes
            else:
                expected, offset, stored, encoding = next(digests)
                chunk = raw[offset : offset + stored]
                if encoding == "zstd":
                    chunk = unpack(chunk, nbytes)
            need(len(chunk) == nbytes and digest(chunk) == expected, f"{file['name']}: a chunk")
            shard += chunk
        shards.append(shard)
    return shards


def unpack(frame: bytes, nbytes: int) -> bytes:
    try:
        need(zstandard.get_frame_parameters(frame).content_size == nbytes, "a chunk's content size")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError(f"a chunk: {error}") from None


def check_header(folder: Path, file: Json, entries: list[tuple[str, str, list[int], Box]]) -> None:
    """A raw file is a safetensors file whose keys, dtypes, shapes and offsets follow from the layout."""
    raw = (folder / file["name"]).read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    expected, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, (offsets, sizes) in entries:
        key = name.removeprefix(file["group"] + ".") if file["group"] != "state" else name
        if list(sizes) != list(shape):
            key += "[" + ",".join(f"{a}:{a + n}" for a, n in zip(offsets, sizes, strict=True)) + "]"
        nbytes = prod(sizes) * ITEM[dtype]
        stored = list(sizes) if dtype in ST else [nbytes]
        expected[key] = {"dtype": ST.get(dtype, "U8"), "shape": stored, "data_offsets": [at, at + nbytes]}
        at += nbytes
    need(list(header.items()) == list(expected.items()), f"{file['name']}: header")


def put(target: bytearray, shape: list[int], box: Box, data: bytes, item: int) -> None:
    """Copy a row-major box into a row-major tensor, run by run of the last dimension."""
    offsets, sizes = box
    if not sizes:
        target[:] = data
        return
    run = sizes[-1] * item
    for number, index in enumerate(product(*(range(n) for n in sizes[:-1]))):
        at = 0
        for i, offset, size in zip(index, offsets, shape, strict=False):
            at = at * size + offset + i
        at = (at * shape[-1] + offsets[-1]) * item
        target[at : at + run] = data[number * run : (number + 1) * run]


# ---------------------------------------------------------------- values


def value(node: Any) -> Any:
    """Typed JSON as Python values; any other type than Python's commonest is (tag, fields)."""
    if isinstance(node, list):
        return [value(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag, v = node["t"], node.get("v")
    if tag == "int":
        return int(v, 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(v[4:]))[0] if v.startswith("nan:") else float.fromhex(v)
    if tag in {"bytes", "bytearray"}:
        return base64.b64decode(v) if tag == "bytes" else bytearray(base64.b64decode(v))
    if tag == "str":
        return base64.b64decode(v).decode("utf-8", "surrogatepass")
    if tag in {"dict", "OrderedDict", "Counter", "defaultdict"}:
        return {value(v[i]): value(v[i + 1]) for i in range(0, len(v), 2)}
    if tag in {"tuple", "set", "frozenset"}:
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](value(v))
    fields = {name: value(inner) for name, inner in node.items() if name != "t"}
    for name in ("extra", "state"):
        if name in fields:
            fields[name] = value({"t": "dict", "v": node[name]})
    return tag, fields


# ---------------------------------------------------------------- a step


def read_step(run: Path, number: int | None = None) -> Step:
    """The live step of that number, or the newest, whole."""
    live = live_steps(run)
    need(live, "no committed step")
    folder, commit = live[max(live) if number is None else number]
    step, world = Step(commit["step"], commit["attempt"]), commit["world"]
    layouts, layout_of = {}, {}
    for ref in commit["layouts"]:
        raw = (run / "layouts" / f"{ref['digest']}.json").read_bytes()
        need(digest(raw) == ref["digest"] and len(raw) == ref["nbytes"], "a layout")
        layouts[ref["digest"]] = record(raw)
        step.aliases |= layouts[ref["digest"]]["aliases"]
        for first, last in ref["ranks"]:
            layout_of |= dict.fromkeys(range(first, last + 1), ref["digest"])
    need(sorted(layout_of) == list(range(world)) and len(commit["parts"]) == world, "ranks")
    for file in commit["files"]:
        need(digest((folder / file["name"]).read_bytes()) == file["digest"], file["name"])
    parts: dict[str, tuple[str, list[int], bytearray]] = {}
    filled: dict[str, int] = {}
    for tensor in (t for layout in layouts.values() for t in layout["tensors"]):
        nbytes = prod(tensor["shape"]) * ITEM[tensor["dtype"]]
        parts.setdefault(tensor["name"], (tensor["dtype"], tensor["shape"], bytearray(nbytes)))
    for rank, ref in enumerate(commit["parts"]):
        raw = (folder / f"part-{rank:05d}-of-{world:05d}.json").read_bytes()
        need(digest(raw) == ref["digest"] and len(raw) == ref["nbytes"], f"part of rank {rank}")
        part = record(raw)
        found = (part["step"], part["attempt"], part["rank"], part["world"], part["layout"])
        need(found == (step.number, step.attempt, rank, world, layout_of[rank]), f"part of rank {rank}")
        if part["values"] is not None:
            step.values.append({key: value(node) for key, node in part["values"].items()})
        step.rank_values.append({key: value(node) for key, node in part["rank_values"].items()})
        step.rank_tensors.append({})
        own = {tensor["name"] for tensor in part["rank_tensors"]}
        for file in part["files"]:
            ending = "safetensors" if file["encoding"] == "raw" else "pack"
            need(file["name"] == f"{file['group']}-{rank:05d}-of-{world:05d}.{ending}", f"file name {file['name']}")
            entries = file_table(layouts[part["layout"]], part, file["group"])
            shards = read_shards(folder, file, [prod(box[1]) * ITEM[dtype] for _, dtype, _, box in entries])
            if file["encoding"] == "raw":
                check_header(folder, file, entries)
            for (name, dtype, shape, box), shard in zip(entries, shards, strict=True):
                if name in own:
                    step.rank_tensors[rank][name] = (dtype, tuple(shape), shard)
                    continue
                put(parts[name][2], shape, box, shard, ITEM[dtype])
                filled[name] = filled.get(name, 0) + len(shard)
    for name, (dtype, shape, data) in parts.items():
        need(filled.get(name) == len(data), f"{name}: {filled.get(name)} of {len(data)} bytes")
        step.tensors[name] = (dtype, tuple(shape), bytes(data))
    return step
