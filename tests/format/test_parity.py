"""ckpt.format.parity: the record, and the arithmetic."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from ckpt.errors import BadInputError, DamagedError
from ckpt.format import records
from ckpt.format.parity import (
    Member,
    Parity,
    decode_parity,
    encode_parity,
    parse_record_name,
    record_name,
    xor_into,
    xor_name,
)

D = "d" * 32
MEMBERS = (
    Member(2, "model-00002-of-00008.safetensors", 20 << 20),
    Member(2, "optimizer-00002-of-00008.pack", 7),
    Member(3, "model-00003-of-00008.safetensors", 4096),
)
PARITY = Parity("ckpt/1", 300, "w7.3", 8, MEMBERS, "parity-00002-of-00008.xor", 20 << 20, (D, D))
WHERE = "run/step-00000300-w7.3/parity-00002-of-00008.json"


def test_round_trip():
    """A record comes back; one without members says that there is no file."""
    assert decode_parity(encode_parity(PARITY), WHERE) == PARITY
    nothing = replace(PARITY, members=(), nbytes=0, chunks=())
    assert decode_parity(encode_parity(nothing), WHERE) == nothing


def test_names():
    """The lowest rank of a node names its record and its file."""
    assert (record_name(2, 8), xor_name(2, 8)) == ("parity-00002-of-00008.json", "parity-00002-of-00008.xor")
    assert parse_record_name("parity-00002-of-00008.json") == (2, 8)
    for other in ("parity-2-of-8.json", "parity-00002-of-00008.xor", "parity-000002-of-00008.json", "part-00002.json"):
        assert parse_record_name(other) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step -1"),
        ({"attempt": "w7"}, "the attempt 'w7'"),
        ({"world": 0}, "world 0"),
        ({"members": (*MEMBERS, MEMBERS[0])}, "a member twice"),
        ({"members": (replace(MEMBERS[0], name="../../etc/passwd"),)}, "a data file of rank 2"),
        ({"members": (replace(MEMBERS[0], name="part-00002-of-00008.json"),)}, "a data file of rank 2"),
        ({"members": (replace(MEMBERS[0], rank=8, name="model-00008-of-00008.safetensors"),)}, "rank of a member 8"),
        ({"name": "../x.xor"}, "'../x.xor'"),
        ({"nbytes": 5}, "a file of 5 bytes"),
        ({"chunks": (D,)}, "1 digests"),
        ({"chunks": (D, "x")}, "digest 'x'"),
    ],
)
def test_impossible_records_are_refused(change: dict[str, object], words: str):
    """By readers as damage, by writers as bad input."""
    broken = replace(PARITY, **change)
    with pytest.raises(BadInputError):
        encode_parity(broken)
    with pytest.raises(DamagedError, match=words.replace("(", r"\(")):
        decode_parity(records.encode(broken), WHERE)


def test_any_one_member_is_the_xor_of_the_rest():
    """Of several lengths, odd ones and none among them."""
    source = random.Random(1)
    members = [source.randbytes(nbytes) for nbytes in (1000, 1, 0, 4097, 4097)]
    whole = bytearray(4097)
    for member in members:
        xor_into(memoryview(whole), member)
    for lost in range(len(members)):
        rebuilt = bytearray(whole)
        for index, member in enumerate(members):
            if index != lost:
                xor_into(memoryview(rebuilt), memoryview(member))
        assert bytes(rebuilt[: len(members[lost])]) == members[lost]
        assert not any(rebuilt[len(members[lost]) :])
