"""Hold records: a reader's sign that it reads an attempt, which retention and prune leave alone meanwhile."""

from __future__ import annotations

import re

import msgspec

from ckpt.format import records
from ckpt.format.commit import Attempt, parse_folder

HOLDS = "holds"
HOLD_LIMIT_NBYTES = 1 << 16
MAX_HOLD_S = 7 * 86_400.0

_NAME = re.compile(r"(step-.{1,64})\.([0-9a-f]{16})\.json")


class Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who reads which attempt, and until when that is believed."""

    format: str
    folder: str  # of the attempt
    host: str
    pid: int
    process: str  # boot, pid namespace, pid and start time, joined by dots: names a process for ever; "" if not known
    created_unix_s: float
    until_unix_s: float


def hold_key(folder: str, nonce: str) -> str:
    """``holds/step-00000300-w7.3.5f0c2a9e1b7d4c36.json``."""
    return f"{HOLDS}/{folder}.{nonce}.json"


def parse_hold_name(name: str) -> Attempt | None:
    """The attempt that a hold of this name is on, or None for any other name."""
    match = _NAME.fullmatch(name)
    return parse_folder(match[1]) if match else None


def encode_hold(hold: Hold) -> bytes:
    """A hold's bytes. BadInputError for one that no reader would take."""
    return records.encode_checked(hold, check_hold)


def decode_hold(raw: bytes, where: str) -> Hold:
    """The hold in ``raw``; ``where`` is its key."""
    hold = records.decode(raw, Hold, where)
    check_hold(hold, where)
    return hold


def check_hold(hold: Hold, where: str) -> None:
    """DamagedError for a record that no ckpt wrote, although it can be read."""
    if parse_folder(hold.folder) is None:
        raise records.damaged(where, f"a hold on {hold.folder[:64]!r}", "the folder of an attempt")
    records.check_count(hold.pid, where, "pid")
    for what in ("host", "process"):
        records.check_text(getattr(hold, what), where, what)
    records.check_time(hold.created_unix_s, where)
    records.check_time(hold.until_unix_s, where)
    if not 0 <= hold.until_unix_s - hold.created_unix_s <= MAX_HOLD_S:
        raise records.damaged(where, "a hold that ends before it begins, or lasts for more than a week", "its own end")
