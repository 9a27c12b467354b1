"""Writer records: one opening of a run for writing, numbered by a create-only put. The fencing token."""

from __future__ import annotations

import re

import msgspec

from ckpt.errors import DamagedError
from ckpt.format import records

WRITERS = "writers"

_NAME = re.compile(r"([0-9]{6,18})\.json")
_DIGEST = re.compile(rb',"digest":"([^"]*)"}\Z')  # the last field: of the bytes without it


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who opened the run, where, and which step its line goes on from (None: from nothing)."""

    format: str
    number: int
    nonce: str
    job: str
    host: str
    pid: int
    world: int  # 0: a rollback, which writes no step
    resumed_from: int | None
    created_unix_s: float


def writer_key(number: int) -> str:
    """``writers/000007.json``."""
    return f"{WRITERS}/{number:06d}.json"


def parse_writer_name(name: str) -> int | None:
    """The number in ``000007.json``, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and f"{int(match[1]):06d}.json" == name else None


def encode_writer(writer: Writer) -> bytes:
    """A writer record's bytes, its digest last. BadInputError for one that no reader would take."""
    raw = records.encode_checked(writer, check_writer)
    return raw[:-1] + f',"digest":"{records.digest(raw)}"}}'.encode()


def decode_writer(raw: bytes, where: str) -> Writer:
    """The writer record in ``raw``; ``where`` is its key. Nothing pins it but itself: its last field is its digest.

    A record without that field is taken as it is: the first versions wrote none.
    """
    match = _DIGEST.search(raw)
    if match is not None:
        raw = raw[: match.start()] + b"}"
    writer = records.decode(raw, Writer, where)
    if match is not None and records.digest(raw) != match[1].decode(errors="replace"):
        raise DamagedError(f"{where}: altered: its last field is not the digest {records.digest(raw)} of the others")
    check_writer(writer, where)
    return writer


def check_writer(writer: Writer, where: str) -> None:
    """DamagedError for a record that no ckpt wrote, although it can be read."""
    records.check_count(writer.number, where, "writer number", least=1)
    records.check_count(writer.pid, where, "pid")
    records.check_count(writer.world, where, "world", most=records.MAX_WORLD)
    if writer.resumed_from is not None:
        records.check_count(writer.resumed_from, where, "resumed_from")
    elif writer.world == 0:
        raise records.damaged(where, "a rollback (world 0) to no step", "the step in resumed_from")
    for what in ("nonce", "job", "host"):
        records.check_text(getattr(writer, what), where, what)
    records.check_time(writer.created_unix_s, where)
