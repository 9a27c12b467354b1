"""Steps written by hand: any world size in one process, without torch, keeper or process group.

For tests of readers. It is made of the format's records and the planner only, so it is also the
format's second writer: what it and the engine disagree on is a defect of one of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec

from ckpt.format import records
from ckpt.format.chunk import RAW, chunk_spans, encode_zstd
from ckpt.format.commit import HF_INDEX, Attempt, Commit, FileRef, LayoutRef
from ckpt.format.layout import encode_layout, layout_key
from ckpt.format.parity import Member, Parity, encode_parity, record_name, xor_into, xor_name
from ckpt.format.part import DataFile, PackedChunk, Part, RankTensor, data_name, encode_part, part_name
from ckpt.format.safetensors import DTYPE_NBYTES, HeaderEntry, build_header, st_dtype
from ckpt.format.values import encode, values_digest
from ckpt.plan.boxes import Box, LayoutBoxes, whole_box
from ckpt.plan.files import Entry, file_tables
from ckpt.plan.save import Group, LocalTensor, Structure, hf_index, plan_layouts
from ckpt.run import Run


class HandTensor(msgspec.Struct, frozen=True):
    """A whole tensor and how it is cut: ``data`` are its bytes, row-major; no ``mesh`` means a replica on every rank.

    ``ranks`` are those that have it (None: all), as with pipeline stages.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    group: str = "state"
    mesh: tuple[int, ...] | None = None
    placements: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    kind: str = "tensor"


class RankOwn(msgspec.Struct, frozen=True):
    """What only one rank has."""

    values: dict[str, Any] = {}
    tensors: tuple[HandTensor, ...] = ()


def filled(shape: Sequence[int], dtype: str, seed: int = 0) -> bytes:
    """Bytes for a tensor that tell every element and every seed apart, as far as the dtype can."""
    nbytes = prod(shape) * DTYPE_NBYTES[dtype]
    pattern = records.digest(f"{seed} {dtype}".encode()).encode()
    whole = b"".join(
        records.digest(pattern + block.to_bytes(8, "little")).encode() for block in range(-(-nbytes // len(pattern)))
    )
    data = whole[:nbytes]
    return bytes(byte & 1 for byte in data) if dtype == "bool" else data


def write_step(
    run: Run,
    step: int,
    tensors: Sequence[HandTensor],
    *,
    world: int = 1,
    values: Mapping[str, Any] | None = None,
    own: Sequence[RankOwn] = (),
    aliases: Mapping[str, str] | None = None,
    encoding: str = RAW,
    parity: Sequence[Sequence[int]] = (),
    extra: Mapping[str, bytes] | None = None,
    writer: int | None = None,
    commit: bool = True,
    created_unix_s: float | None = None,
) -> Attempt:
    """Write one attempt, and with ``commit`` make it a step. ``writer`` None: the newest, or a first one.

    ``parity``: sets of ranks, each of which gets a parity file. ``extra``: files that COMMIT pins besides, by name.
    """
    if writer is None:
        numbers = [record.number for record in run.writers()]
        writer = numbers[-1] if numbers else run.open_writer(job="by hand", world=world, resumed_from=None).number
    save = 1 + max((a.save for a in run.attempts() if a.writer == writer), default=0)
    attempt = Attempt(step, writer, save)
    groups = _groups(tensors, world, dict(aliases or {}))
    layouts = plan_layouts(groups)
    encoded = [encode_layout(layout) for layout in layouts]
    nodes = {key: encode(tree, f"state[{key!r}]") for key, tree in (values or {}).items()}
    data = {tensor.name: tensor for tensor in tensors}
    parts = []
    written: list[list[DataFile]] = []
    for rank in range(world):
        index = next(i for i, group in enumerate(groups) if rank in group.ranks)
        mine = own[rank] if rank < len(own) else RankOwn()
        rank_tensors = tuple(RankTensor(t.name, t.dtype, t.shape, t.kind) for t in mine.tensors)
        tables = file_tables(layouts[index], rank, rank_tensors, LayoutBoxes(layouts[index]))
        whole = {**data, **{tensor.name: tensor for tensor in mine.tensors}}
        files = [_write_file(run, attempt, rank, world, table, whole, encoding) for table in tables.values()]
        written.append(files)
        part = Part(
            format=records.FORMAT,
            step=step,
            attempt=attempt.label,
            rank=rank,
            world=world,
            layout=encoded[index][0],
            files=tuple(files),
            rank_tensors=rank_tensors,
            values=nodes if rank == groups[index].ranks[0] else None,
            values_digests={key: values_digest(node) for key, node in nodes.items()},
            rank_values={key: encode(tree, f"state[{key!r}]") for key, tree in mine.values.items()},
        )
        parts.append(_put(run, attempt, part_name(rank, world), encode_part(part)))
    index_raw = hf_index(layouts, world) if encoding == RAW else None
    pinned = [] if index_raw is None else [_put(run, attempt, HF_INDEX, index_raw)]
    pinned += [_put(run, attempt, name, raw) for name, raw in (extra or {}).items()]
    pinned += [_write_parity(run, attempt, ranks, written) for ranks in parity]
    if commit:
        refs = [
            LayoutRef(digest, len(raw), _ranges(group.ranks))
            for (digest, raw), group in zip(encoded, groups, strict=True)
        ]
        record = Commit(
            format=records.FORMAT,
            step=step,
            attempt=attempt.label,
            world=world,
            features=("zstd",) if encoding != RAW else (),
            written_by="ckpt 0.1.0 by hand",
            created_unix_s=time.time() if created_unix_s is None else created_unix_s,
            layouts=tuple(refs),
            parts=tuple(parts),
            files=tuple(pinned),
        )
        run.commit(attempt, record, encoded)
    else:
        for digest, raw in encoded:
            if not run.store.exists(layout_key(digest)):
                run.store.create(layout_key(digest), raw)
    return attempt


def _groups(tensors: Sequence[HandTensor], world: int, aliases: dict[str, str]) -> list[Group]:
    """Ranks that have the same tensors, together."""
    members: dict[tuple[str, ...], list[int]] = {}
    for rank in range(world):
        names = tuple(t.name for t in tensors if t.ranks is None or rank in t.ranks)
        members.setdefault(names, []).append(rank)
    groups = []
    for names, ranks in members.items():
        local = tuple(_local(tensor, world) for tensor in tensors if tensor.name in names)
        tied = {other: name for other, name in aliases.items() if name in names}
        groups.append(Group(Structure(local, tied), tuple(ranks)))
    return groups


def _ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ranks as inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == rank - 1 else rank
        ranges.append((first, rank))
    return tuple(ranges)


def _local(tensor: HandTensor, world: int) -> LocalTensor:
    ranks = None if tensor.mesh is None else tensor.ranks or tuple(range(world))
    return LocalTensor(
        name=tensor.name,
        group=tensor.group,
        dtype=tensor.dtype,
        shape=tensor.shape,
        mesh_shape=tensor.mesh,
        mesh_ranks=ranks,
        placements=tensor.placements,
        kind=tensor.kind,
    )


def _write_file(
    run: Run,
    attempt: Attempt,
    rank: int,
    world: int,
    table: Sequence[Entry],
    data: Mapping[str, HandTensor],
    encoding: str,
) -> DataFile:
    group = table[0].group
    name = data_name(group, rank, world, encoding)
    shards = [cut(data[entry.name].data, data[entry.name].shape, entry.box, entry.dtype) for entry in table]
    chunks = [shard[offset : offset + n] for shard in shards for offset, n in chunk_spans(len(shard))]
    digests = tuple(records.digest(chunk) for chunk in chunks)
    if encoding == RAW:
        rows = [HeaderEntry(e.key, *st_dtype(e.dtype, e.box.sizes), e.nbytes) for e in table]
        header = build_header(rows, {"format": "pt"})
        content = header + b"".join(shards)
        file = DataFile(group, name, len(content), encoding, len(header), records.digest(header), digests)
    else:
        packed: list[PackedChunk] = []
        content = b""
        for digest, chunk in zip(digests, chunks, strict=True):
            frame = encode_zstd(chunk)
            raw, kind = (chunk, RAW) if frame is None else (frame, encoding)
            packed.append(PackedChunk(digest, len(content), len(raw), kind))
            content += raw
        file = DataFile(group, name, len(content), encoding, 0, "", (), tuple(packed))
    with run.store.open_sink(run.key(attempt, name), len(content)) as sink:
        sink.write(content)
    return file


def _write_parity(run: Run, attempt: Attempt, ranks: Sequence[int], written: Sequence[Sequence[DataFile]]) -> FileRef:
    lowest, world = min(ranks), len(written)
    members = tuple(Member(rank, file.name, file.nbytes) for rank in sorted(ranks) for file in written[rank])
    total = bytearray(max((member.nbytes for member in members), default=0))
    for member in members:
        xor_into(memoryview(total), run.store.get(run.key(attempt, member.name)))
    if members:
        with run.store.open_sink(run.key(attempt, xor_name(lowest, world)), len(total)) as sink:
            sink.write(memoryview(total))
    record = Parity(
        format=records.FORMAT,
        step=attempt.step,
        attempt=attempt.label,
        world=world,
        members=members,
        name=xor_name(lowest, world),
        nbytes=len(total),
        chunks=tuple(records.digest(total[offset : offset + n]) for offset, n in chunk_spans(len(total))),
    )
    return _put(run, attempt, record_name(lowest, world), encode_parity(record))


def cut(data: bytes, shape: Sequence[int], box: Box, dtype: str) -> bytes:
    """The bytes of a box of a whole tensor, one row at a time: slow, plain and right."""
    itemsize = DTYPE_NBYTES[dtype]
    if box == whole_box(shape):
        return data
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    rows = [0]
    for size, offset, stride in zip(box.sizes[:-1], box.offsets[:-1], strides[:-1], strict=True):
        rows = [start + (offset + i) * stride for start in rows for i in range(size)]
    first, length = box.offsets[-1], box.sizes[-1]
    return b"".join(data[(start + first) * itemsize : (start + first + length) * itemsize] for start in rows)


def _put(run: Run, attempt: Attempt, name: str, raw: bytes) -> FileRef:
    run.store.create(run.key(attempt, name), raw)
    return FileRef(name, len(raw), records.digest(raw))
