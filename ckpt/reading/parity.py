"""A step's parity records, and the bytes that XOR gives back."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable

from ckpt.errors import DamagedError
from ckpt.format.commit import Commit, FileRef
from ckpt.format.parity import Parity, decode_parity, parse_record_name, xor_into, xor_name

Read = Callable[[str, int, memoryview], None]  # a file of the step, an offset, and what to fill from there

_RANK = re.compile(r"[a-z]+-([0-9]{5,})-of-[0-9]{5,}\.[a-z]+")


def parity_refs(commit: Commit) -> list[tuple[int, FileRef]]:
    """(lowest rank, pinned record) of each node that wrote parity, by rank."""
    found = ((parse_record_name(ref.name), ref) for ref in commit.files)
    return sorted(((name[0], ref) for name, ref in found if name is not None), key=lambda item: item[0])


def parity_of(commit: Commit, ref: FileRef, raw: bytes, where: str) -> Parity:
    """The record in ``raw``. DamagedError when it is not that of the step and of its name."""
    parity = decode_parity(raw, where)
    named = parse_record_name(ref.name)
    if (parity.step, parity.attempt, parity.world) != (commit.step, commit.attempt, commit.world):
        raise DamagedError(f"{where}: is the parity of another attempt")
    if named is None or parity.name != xor_name(*named):
        raise DamagedError(f"{where}: names {parity.name}, expected {ref.name.removesuffix('json')}xor")
    return parity


class StepParity:
    """The parity records of a step, each read when a file that may be in it is damaged. Safe for several threads."""

    def __init__(self, commit: Commit, read_record: Callable[[FileRef], Parity]) -> None:
        self._refs = parity_refs(commit)
        self._read_record = read_record
        self._known: dict[str, Parity] = {}
        self._lock = threading.RLock()

    def covering(self, name: str) -> Parity | None:
        """The record that has the data file ``name`` among its members; None: no parity was written for it.

        DamagedError, StoreError when a record that may have it cannot be had.
        """
        match = _RANK.fullmatch(name)
        if match is None or not self._refs:
            return None
        likely = bisect_right([rank for rank, _ in self._refs], int(match[1])) - 1
        # A node's ranks follow each other nearly everywhere: its record is the last one that begins before.
        order = sorted(range(len(self._refs)), key=lambda place: abs(place - likely))
        for place in order:
            parity = self._record(self._refs[place][1])
            if any(member.name == name for member in parity.members):
                return parity
        return None

    def _record(self, ref: FileRef) -> Parity:
        with self._lock:
            if ref.name not in self._known:
                self._known[ref.name] = self._read_record(ref)
            return self._known[ref.name]


def rebuilt(parity: Parity, name: str, offset: int, nbytes: int, read: Read) -> bytearray:
    """``nbytes`` stored bytes at ``offset`` of the member ``name``: the XOR of the parity file and all other members.

    Not verified: they are right if all that was read was. DamagedError when the member does not reach that far.
    """
    whole = next(member.nbytes for member in parity.members if member.name == name)
    if offset + nbytes > whole:
        raise DamagedError(f"{parity.name}: has {name} with {whole} bytes, {offset + nbytes} are asked for")
    others = [(member.name, member.nbytes) for member in parity.members if member.name != name]
    return xor_of([(parity.name, parity.nbytes), *others], offset, nbytes, read)


def xor_of_members(parity: Parity, offset: int, nbytes: int, read: Read) -> bytearray:
    """``nbytes`` bytes at ``offset`` of the XOR file, from its members."""
    return xor_of([(member.name, member.nbytes) for member in parity.members], offset, nbytes, read)


def xor_of(files: Iterable[tuple[str, int]], offset: int, nbytes: int, read: Read) -> bytearray:
    """The XOR of these files (name, size) in one range; a file that ends before counts as 0 there."""
    total = bytearray(nbytes)
    for name, size in files:
        there = min(nbytes, size - offset)
        if there > 0:
            piece = memoryview(bytearray(there))
            read(name, offset, piece)
            xor_into(memoryview(total), piece)
    return total
