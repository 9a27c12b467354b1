"""Files of a step that can be made anew from its other files: parity, its records, the Hugging Face index."""

from __future__ import annotations

import msgspec

from ckpt.errors import CkptError, DamagedError
from ckpt.format import records
from ckpt.format.chunk import chunk_spans
from ckpt.format.commit import HF_INDEX, FileRef
from ckpt.format.parity import Member, Parity, encode_parity, parse_record_name, xor_name
from ckpt.format.safetensors import HeaderEntry, build_header, st_dtype
from ckpt.plan.save import hf_index
from ckpt.reading.parity import parity_refs, xor_of_members
from ckpt.reading.shards import FileShards
from ckpt.reading.spans import Span
from ckpt.reading.step import StepReader
from ckpt.run import check_pinned

MEMBERS = "the data files it is made of"
LAYOUTS_OF_IT = "the layouts it is made of"
LAYOUT = "its layout"


def remade(reader: StepReader, ref: FileRef, error: CkptError) -> tuple[bytes, str]:
    """(bytes, where from) of a pinned file that is not right here: from elsewhere, or made anew. Raises ``error``."""
    try:
        return reader.sources.pinned(ref, error)
    except CkptError as nowhere:
        made = None
        if ref.name == HF_INDEX:
            made = _index(reader), LAYOUTS_OF_IT
        elif parse_record_name(ref.name) is not None:
            made = _record(reader, ref), MEMBERS
        if made is None or made[0] is None:
            raise
        try:
            check_pinned(made[0], ref.nbytes, ref.digest, reader.where(ref.name))
        except DamagedError:
            raise nowhere from None
        return made[0], made[1]


def _index(reader: StepReader) -> bytes | None:
    try:
        return hf_index([reader.layout_boxes(ref.digest).layout for ref in reader.commit.layouts], reader.commit.world)
    except (CkptError, ValueError):
        return None


def _record(reader: StepReader, ref: FileRef) -> bytes | None:
    """A parity record anew: of the ranks up to the next node's lowest, with the digests of their files' XOR."""
    named = parse_record_name(ref.name)
    assert named is not None
    lowest, world = named
    later = [rank for rank, _ in parity_refs(reader.commit) if rank > lowest]
    try:
        parts = [reader.part(rank) for rank in range(lowest, min([*later, world]))]
        members = tuple(Member(part.rank, file.name, file.nbytes) for part in parts for file in part.files)
        nbytes = max((member.nbytes for member in members), default=0)
        record = Parity(
            format=records.FORMAT,
            step=reader.commit.step,
            attempt=reader.commit.attempt,
            world=world,
            members=members,
            name=xor_name(lowest, world),
            nbytes=nbytes,
            chunks=(),
        )
        # The digests that are asked for are those of what is read here; COMMIT's digest of the record tells.
        read = reader.sources.read_anywhere
        chunks = tuple(
            records.digest(xor_of_members(record, offset, length, read)) for offset, length in chunk_spans(nbytes)
        )
        return encode_parity(msgspec.structs.replace(record, chunks=chunks))
    except CkptError:
        return None


def header(shards: FileShards) -> bytes | None:
    """A raw file's header anew, from the layout; None when that is not the one that was written."""
    try:
        rows = [
            HeaderEntry(placed.entry.key, *st_dtype(placed.entry.dtype, placed.entry.box.sizes), placed.entry.nbytes)
            for placed in shards.shards
        ]
        made = build_header(rows, {"format": "pt"})
    except CkptError:
        return None
    return made if records.digest(made) == shards.file.header_digest else None


def xor_span(reader: StepReader, parity: Parity, span: Span, error: CkptError) -> tuple[bytes | bytearray, str]:
    """(bytes, where from) of a stretch of an XOR file: from its members, or from elsewhere. Raises ``error``."""
    try:
        stored = xor_of_members(parity, span.offset, span.nbytes, reader.sources.read_anywhere)
        span.decoded(stored, parity.name)
    except CkptError:
        found, _, source = reader.sources.span(parity.name, span, error)
        return found, source
    return stored, MEMBERS


def data_span(reader: StepReader, shards: FileShards, span: Span, error: CkptError) -> tuple[bytes | bytearray, str]:
    """(bytes, where from) of a stretch of a data file that is not right here. Raises ``error``, with what was tried."""
    if span.chunk is None and (made := header(shards)) is not None:
        return made, LAYOUT
    stored, _, source = reader.sources.span(shards.file.name, span, error)
    return stored, source
