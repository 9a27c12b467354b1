"""A part: what one rank contributed to a step. Its files, the digests of their chunks, and its values."""

from __future__ import annotations

from typing import Any

import msgspec

from ckpt.format import records
from ckpt.format.alarms import Alarm, check_alarms
from ckpt.format.chunk import CHUNK_NBYTES, ENCODINGS, RAW
from ckpt.format.layout import GROUPS, check_typed_shape
from ckpt.format.names import is_name
from ckpt.format.safetensors import HEADER_LIMIT_NBYTES


class PackedChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where one encoded chunk lies in a pack: ``encoding`` is ``zstd`` or ``raw``."""

    digest: str  # of the raw bytes
    offset: int
    nbytes: int  # as stored
    encoding: str


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data file of a rank.

    A raw file is a safetensors file: ``header_nbytes`` bytes of header (length field and padding
    included) with digest ``header_digest``, then the shards; ``chunks`` are the digests of their
    chunks in order. A pack (``encoding`` not ``raw``) has no header, and ``packed`` instead.
    """

    group: str
    name: str  # inside the attempt's folder
    nbytes: int
    encoding: str  # "raw" or "zstd"
    header_nbytes: int
    header_digest: str
    chunks: tuple[str, ...]
    packed: tuple[PackedChunk, ...] = ()


class RankTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that only this rank has (declared ``per_rank``): whole, in the ``state`` file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rank's contribution to one attempt.

    ``values`` (typed JSON, see ``ckpt.format.values``) is written by the first rank of each
    layout only; ``values_digests`` (top-level key -> digest) by every rank, so that a value
    that differs between ranks is found at commit. ``rank_values`` are this rank's own. ``alarms``, not
    written when there are none, are what this rank found wrong with the state.
    """

    format: str
    step: int
    attempt: str
    rank: int
    world: int
    layout: str  # digest
    files: tuple[DataFile, ...]
    rank_tensors: tuple[RankTensor, ...]
    values: dict[str, Any] | None
    values_digests: dict[str, str]
    rank_values: dict[str, Any]
    alarms: tuple[Alarm, ...] = ()


def part_name(rank: int, world: int) -> str:
    """``part-00003-of-00008.json``."""
    return f"part-{rank:05d}-of-{world:05d}.json"


def data_name(group: str, rank: int, world: int, encoding: str) -> str:
    """``model-00003-of-00008.safetensors``, or ``.pack`` when encoded."""
    return f"{group}-{rank:05d}-of-{world:05d}.{'safetensors' if encoding == 'raw' else 'pack'}"


def encode_part(part: Part) -> bytes:
    """A part's bytes. BadInputError for one that no reader would take."""
    return records.encode_checked(part, check_part)


def decode_part(raw: bytes, where: str) -> Part:
    """The part in ``raw``; ``where`` is its key."""
    part = records.decode(raw, Part, where)
    check_part(part, where)
    return part


def check_part(part: Part, where: str) -> None:
    """DamagedError for a part that no ckpt wrote, although it can be read.

    After it every file has the one name that its group, rank and encoding give it, and every chunk
    lies inside its file. What the layout says of the files is for who has the layout.
    """
    records.check_attempt(part.step, part.attempt, part.world, where)
    records.check_count(part.rank, where, "rank", most=part.world - 1)
    records.check_digest(part.layout, where, "its layout")
    groups = [file.group for file in part.files]
    if groups != [group for group in GROUPS if group in groups]:
        shown = [group[:64] for group in groups[:4]]
        raise records.damaged(
            where, f"files of the groups {shown}", f"each of {', '.join(GROUPS)} at most once, in order"
        )
    for file in part.files:
        name = data_name(file.group, part.rank, part.world, file.encoding)
        if file.encoding not in ENCODINGS or file.name != name:
            found = f"the file {file.name[:64]!r} of encoding {file.encoding[:64]!r}"
            raise records.damaged(where, found, f"{name!r}, and raw or zstd")
        _check_file(file, f"{where}: {name}")
    names = [tensor.name for tensor in part.rank_tensors]
    if len(set(names)) != len(names):
        raise records.damaged(where, "two tensors of its own with one name", "each name once")
    for tensor in part.rank_tensors:
        at = f"{where}: tensor {tensor.name[:200]!r}"
        if not is_name(tensor.name):
            raise records.damaged(at, "no name by the escaping rule", "components joined by '.'")
        check_typed_shape(tensor.dtype, tensor.shape, tensor.kind, at)
    for key, digest in part.values_digests.items():
        records.check_digest(digest, where, f"the value {key[:200]!r}")
    check_alarms(part.alarms, part.world, where)


def _check_file(file: DataFile, where: str) -> None:
    records.check_count(file.nbytes, where, "bytes")
    if file.encoding == RAW:
        _check_raw_file(file, where)
    else:
        _check_pack(file, where)


def _check_raw_file(file: DataFile, where: str) -> None:
    if file.packed:
        raise records.damaged(where, "packed chunks of a raw file", "none")
    records.check_count(file.header_nbytes, where, "header bytes", least=8, most=8 + HEADER_LIMIT_NBYTES)
    records.check_digest(file.header_digest, where, "its header")
    payload = file.nbytes - file.header_nbytes
    records.check_count(payload, where, "payload bytes")
    records.check_digests(file.chunks, where, ["a chunk"] * len(file.chunks))
    # No chunk is empty or longer than 16 MiB; how long each is, the layout says.
    records.check_count(len(file.chunks), where, "chunks, counting", least=-(-payload // CHUNK_NBYTES), most=payload)


def _check_pack(file: DataFile, where: str) -> None:
    if file.header_nbytes or file.header_digest or file.chunks:
        raise records.damaged(where, "a header, or raw chunks, of a pack", "packed chunks only")
    offset = 0
    for chunk in file.packed:
        records.check_digest(chunk.digest, where, "a chunk")
        if chunk.encoding not in ENCODINGS:
            raise records.damaged(where, f"a chunk of encoding {chunk.encoding[:64]!r}", "raw or zstd")
        records.check_count(chunk.nbytes, where, "bytes of a chunk", least=1, most=CHUNK_NBYTES)
        if chunk.offset != offset:
            raise records.damaged(where, "a chunk that does not start where the one before it ends", f"offset {offset}")
        offset += chunk.nbytes
    if offset != file.nbytes:
        raise records.damaged(where, f"chunks of {offset} bytes", f"the file's {file.nbytes}")
