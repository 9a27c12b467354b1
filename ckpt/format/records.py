"""What all records of ``ckpt/1`` have in common: strict JSON in, strict JSON out, and their digests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from ckpt.errors import BadInputError, DamagedError, UnsupportedFormatError
from ckpt.format.nodes import text_of

FORMAT = "ckpt/1"
DIGEST_HEX_CHARS = 32  # xxh3-128

MAX_WORLD = 1 << 24  # ranks
MAX_INT = (1 << 63) - 1  # of steps, sizes and offsets
MAX_UNIX_S = 253_402_300_800.0  # the year 10000, where calendars end
MAX_TEXT_CHARS = 4096  # of what describes a job, a host or a version

Record = TypeVar("Record", bound=msgspec.Struct)

_LABEL = re.compile(r"w([0-9]{1,18})\.([0-9]{1,18})")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGESTS = re.compile(r"[0-9a-f]*")


def digest(data: bytes | bytearray | memoryview) -> str:
    """The xxh3-128 of ``data`` as 32 lower-case hex characters (against accident, not intent)."""
    return xxhash.xxh3_128_hexdigest(data)


def running_digest() -> xxhash.xxh3_128:
    """The same piece by piece: ``update`` it with each, then ask for its ``hexdigest``."""
    return xxhash.xxh3_128()


def encode(record: msgspec.Struct) -> bytes:
    """One record as compact JSON; the same record gives the same bytes."""
    return msgspec.json.encode(record, order="deterministic")


def encode_checked(record: Record, check: Callable[[Record, str], None]) -> bytes:
    """``encode``, but what no reader's ``check`` would take is a BadInputError before it is written."""
    try:
        check(record, f"the {type(record).__name__} record to be written")
    except DamagedError as error:
        raise BadInputError(str(error)) from None
    return encode(record)


def decode(raw: bytes | memoryview, record_type: type[Record], where: str) -> Record:
    """The record in ``raw``; ``where`` (a key) goes into the message.

    Raises UnsupportedFormatError for another ``format`` and DamagedError for anything malformed.
    """
    try:
        found = msgspec.json.decode(raw, type=_Versioned).format
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DamagedError(f"{where}: not a readable ckpt record ({error})") from None
    if found != FORMAT:
        raise UnsupportedFormatError(
            f"{where}: format {text_of(found)!r}, this reader knows {FORMAT!r}; "
            "read it with the ckpt version that wrote it"
        )
    try:
        record = msgspec.json.decode(raw, type=record_type)
        same = encode(record) == raw
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DamagedError(f"{where}: not a readable {record_type.__name__} record ({error})") from None
    if not same:  # other writers may order and space their JSON as they like, but say nothing twice
        _refuse_repeated_keys(bytes(raw), where)
    return record


def damaged(where: str, found: str, expected: str) -> DamagedError:
    """The error for a readable record that says something impossible."""
    return DamagedError(f"{where}: {found}; expected {expected}")


def parse_label(label: str) -> tuple[int, int] | None:
    """(writer, save) of ``w7.3``, both from 1 on; None for any other text."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    writer, save = int(match[1]), int(match[2])
    return (writer, save) if writer and save and f"w{writer}.{save}" == label else None


def check_digest(text: str, where: str, of: str) -> None:
    """DamagedError unless ``text`` is a digest; ``of`` says what it should be the digest of."""
    if _DIGEST.fullmatch(text) is None:
        raise damaged(where, f"the digest {text[:64]!r} of {of}", f"{DIGEST_HEX_CHARS} lower-case hex characters")


def check_digests(texts: Sequence[str], where: str, of: Sequence[str]) -> None:
    """``check_digest`` of each of many; ``of`` says of each what it should be the digest of."""
    if set(map(len, texts)) <= {DIGEST_HEX_CHARS} and _DIGESTS.fullmatch("".join(texts)) is not None:
        return
    for text, what in zip(texts, of, strict=True):
        check_digest(text, where, what)


def check_count(value: int, where: str, what: str, least: int = 0, most: int = MAX_INT) -> None:
    """DamagedError unless ``least <= value <= most``."""
    if not least <= value <= most:
        shown = value if -MAX_INT <= value <= MAX_INT else f"of {value.bit_length()} bits"
        raise damaged(where, f"{what} {shown}", f"{least} to {most}")


def check_attempt(step: int, label: str, world: int, where: str) -> None:
    """DamagedError unless these can be an attempt's step number, label and number of ranks."""
    check_count(step, where, "step")
    if parse_label(label) is None:
        raise damaged(where, f"the attempt {label[:64]!r}", "a label like w7.3")
    check_count(world, where, "world", least=1, most=MAX_WORLD)


def check_text(text: str, where: str, what: str) -> None:
    """DamagedError for text that is too long to be shown in a message."""
    if len(text) > MAX_TEXT_CHARS:
        raise damaged(where, f"{what} of {len(text)} characters", f"at most {MAX_TEXT_CHARS}")


def check_time(unix_s: float, where: str) -> None:
    """DamagedError for a time that no calendar has."""
    if not 0 <= unix_s < MAX_UNIX_S:
        raise damaged(where, f"created_unix_s {unix_s!r}", "seconds since 1970, before the year 10000")


def _refuse_repeated_keys(raw: bytes, where: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise damaged(where, f"the field {key[:64]!r} twice in one object", "each field once")
            found[key] = value
        return found

    try:
        json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: not a readable ckpt record ({error})") from None


class _Versioned(msgspec.Struct):
    format: Any = None
