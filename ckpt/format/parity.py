"""Parity: the XOR of the data files that one node wrote for an attempt, from which any one of them can be rebuilt.

The record is pinned by COMMIT like any other file of the step, and pins the XOR file chunk by chunk. A reader that does
not know it checks the record and leaves the XOR file alone.
"""

from __future__ import annotations

import re

import msgspec

from ckpt.format import records
from ckpt.format.chunk import CHUNK_NBYTES, ENCODINGS, chunk_count
from ckpt.format.layout import GROUPS
from ckpt.format.part import data_name

_NAME = re.compile(r"parity-([0-9]{5,})-of-([0-9]{5,})\.json")


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data file that is in the XOR."""

    rank: int
    name: str
    nbytes: int  # as stored


class Parity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's parity of an attempt.

    Byte i of the XOR file is the XOR of byte i of every member, as stored, a member that is shorter counting as 0
    there. So it is as long as the longest member, and any one member is the XOR of the file and all other members.
    """

    format: str
    step: int
    attempt: str
    world: int
    members: tuple[Member, ...]  # by rank, of a rank in the order of its groups; empty: there is no XOR file
    name: str  # of the XOR file
    nbytes: int
    chunks: tuple[str, ...]  # digests of its bytes, cut at multiples of 16 MiB


def record_name(rank: int, world: int) -> str:
    """``parity-00000-of-00016.json``; ``rank`` is the lowest of the node's."""
    return f"parity-{rank:05d}-of-{world:05d}.json"


def xor_name(rank: int, world: int) -> str:
    """``parity-00000-of-00016.xor``."""
    return f"parity-{rank:05d}-of-{world:05d}.xor"


def parse_record_name(name: str) -> tuple[int, int] | None:
    """(rank, world) of a parity record's name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None or record_name(int(match[1]), int(match[2])) != name:
        return None
    return int(match[1]), int(match[2])


def encode_parity(parity: Parity) -> bytes:
    """A parity record's bytes. BadInputError for one that no reader would take."""
    return records.encode_checked(parity, check_parity)


def decode_parity(raw: bytes, where: str) -> Parity:
    """The parity record in ``raw``; ``where`` is its key."""
    parity = records.decode(raw, Parity, where)
    check_parity(parity, where)
    return parity


def check_parity(parity: Parity, where: str) -> None:
    """DamagedError for a record that no ckpt wrote, although it can be read.

    After it every member's name is that of a data file inside the step, and the XOR file is as long as they ask.
    """
    records.check_attempt(parity.step, parity.attempt, parity.world, where)
    names = set()
    for member in parity.members:
        records.check_count(member.rank, where, "the rank of a member", most=parity.world - 1)
        allowed = {data_name(group, member.rank, parity.world, encoding) for group in GROUPS for encoding in ENCODINGS}
        if member.name not in allowed:
            raise records.damaged(where, f"the member {member.name[:64]!r}", f"a data file of rank {member.rank}")
        records.check_count(member.nbytes, where, f"bytes of {member.name}")
        names.add(member.name)
    if len(names) != len(parity.members):
        raise records.damaged(where, "a member twice", "each file once")
    if re.fullmatch(r"parity-[0-9]{5,}-of-[0-9]{5,}\.xor", parity.name) is None:
        raise records.damaged(where, f"the file {parity.name[:64]!r}", "a name like parity-00000-of-00008.xor")
    longest = max((member.nbytes for member in parity.members), default=0)
    if parity.nbytes != longest:
        raise records.damaged(where, f"a file of {parity.nbytes} bytes", f"{longest}, as the longest member")
    if len(parity.chunks) != chunk_count(parity.nbytes):
        found = f"{len(parity.chunks)} digests"
        raise records.damaged(where, found, f"one for each {CHUNK_NBYTES} of {parity.nbytes} bytes")
    records.check_digests(parity.chunks, where, ["a chunk"] * len(parity.chunks))


def xor_into(target: memoryview, source: memoryview | bytes) -> None:
    """``target`` XOR ``source``, in place; a shorter ``source`` counts as padded with zeros."""
    import numpy as np

    accumulated = np.frombuffer(target, np.uint8, count=len(source))
    np.bitwise_xor(accumulated, np.frombuffer(source, np.uint8), out=accumulated)
