"""ckpt.format.alarms and ckpt.format.finite: what a part says is wrong with a state, and how it is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import BadInputError, DamagedError, UnsupportedFormatError
from ckpt.format import alarms, records
from ckpt.format.alarms import (
    NOT_FINITE,
    RANDOM,
    REPLICAS,
    UNCHANGED,
    Alarm,
    Alarms,
    decode_alarms,
    encode_alarms,
    ranges,
    ranks_text,
)
from ckpt.format.commit import KNOWN_FEATURES
from ckpt.format.finite import count_not_finite, may_be_not_finite
from ckpt.format.part import decode_part, encode_part
from ckpt.format.safetensors import DTYPE_NBYTES
from tests.format.test_part import PART

FLOATS = [dtype for dtype in DTYPE_NBYTES if may_be_not_finite(dtype)]


def counted_by_torch(raw: bytes, dtype: str) -> tuple[int, int]:
    """What torch.isnan and torch.isinf count."""
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
    if dtype == "complex32":
        pairs = torch.view_as_real(tensor)
        return int(pairs.isnan().any(-1).sum()), int(pairs.isinf().any(-1).sum())
    if DTYPE_NBYTES[dtype] == 1:
        tensor = tensor.float()
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def test_which_dtypes_are_counted():
    """All floating and complex dtypes but the packed one that has no NaN; a new dtype must be thought about here."""
    found = {d for d in DTYPE_NBYTES if "float" in d or "complex" in d}
    assert set(FLOATS) == found - {"float4_e2m1fn_x2"}
    for dtype in set(DTYPE_NBYTES) - set(FLOATS):
        assert count_not_finite(b"\xff" * 48, dtype) == (0, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_of_the_first_two_bytes(dtype):
    """Sign and exponent in all combinations, with no, the least and a full mantissa behind: as torch says of each."""
    nbytes = DTYPE_NBYTES[dtype] // (2 if dtype.startswith("complex") else 1)
    if nbytes == 1:
        raw = bytes(range(256))
    else:
        heads = np.arange(65536, dtype="<u2").view("u1").reshape(-1, 2)
        rows = []
        for low in (0, 1, 255):
            tail = np.zeros((65536, nbytes - 2), "u1")
            if nbytes > 2:
                tail[:] = low if low == 255 else 0
                tail[:, 0] = low
            rows.append(np.hstack([tail, heads]))
        raw = np.vstack(rows).tobytes()
    size = DTYPE_NBYTES[dtype]
    raw = raw[: len(raw) // size * size]
    assert count_not_finite(raw, dtype) == counted_by_torch(raw, dtype)
    for start in range(0, len(raw), max(size, len(raw) // 64 // size * size)):  # one by one, no bad neighbours
        piece = raw[start : start + size]
        assert count_not_finite(piece, dtype) == counted_by_torch(piece, dtype), piece.hex()


@given(st.data())
def test_counts_are_torchs(data):
    """Bytes of any kind and length, at any alignment, with any number of special values strewn in."""
    dtype = data.draw(st.sampled_from(FLOATS))
    size = DTYPE_NBYTES[dtype]
    raw = bytearray(data.draw(st.binary(min_size=size, max_size=40 * size)))
    raw = raw[: len(raw) // size * size]
    component = size // (2 if dtype.startswith("complex") else 1)
    specials = {
        1: [b"\x7f", b"\xff", b"\x80", b"\x7c", b"\xfc", b"\x7b"],
        2: [b"\x00\x7c", b"\x00\xfc", b"\x01\x7c", b"\x80\x7f", b"\x80\xff", b"\x81\xff", b"\x7f\x7f"],
        4: [b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\x80\x7f", b"\xff\xff\x7f\xff"],
        8: [b"\x00" * 6 + b"\xf0\x7f", b"\x00" * 6 + b"\xf0\xff", b"\x01" + b"\x00" * 5 + b"\xf0\xff"],
    }[component]
    for place in data.draw(st.lists(st.integers(0, len(raw) // component - 1), max_size=6)):
        raw[place * component : (place + 1) * component] = data.draw(st.sampled_from(specials))
    shift = data.draw(st.integers(0, 7))
    view = memoryview(bytes(shift) + bytes(raw))[shift:]
    assert count_not_finite(view, dtype) == counted_by_torch(bytes(raw), dtype)


def test_nothing_is_finite():
    """No bytes, no elements."""
    assert [count_not_finite(b"", dtype) for dtype in FLOATS] == [(0, 0)] * len(FLOATS)


FOUND = (
    Alarm(NOT_FINITE, "model.w", nan=3, inf=1, ranks=((0, 0), (2, 3))),
    Alarm(UNCHANGED, "model.b"),
    Alarm(REPLICAS, "optimizer.state.step.model.w", ranks=((1, 1),)),
    Alarm(RANDOM, "rng.torch", ranks=((0, 1),)),
    Alarm(RANDOM, "rng.torch", ranks=((2, 3),)),
)


def test_the_record():
    """It comes back, says only what there is to say, and reads as a sentence."""
    record = Alarms(records.FORMAT, 300, "w7.3", 8, FOUND)
    raw = encode_alarms(record)
    assert decode_alarms(raw, "alarms.json") == record
    assert b'{"kind":"unchanged","tensor":"model.b"}' in raw
    assert str(FOUND[0]) == "model.w (3 NaN, 1 Inf, ranks 0, 2-3)"
    assert str(FOUND[1]) == "model.b"
    assert ranges([3, 2, 0, 2]) == ((0, 0), (2, 3))
    assert ranks_text(((1, 1),)) == "rank 1"
    assert ranks_text(tuple((i, i) for i in range(0, 40, 2))).endswith("12, 14 and 12 more")


def test_a_part_has_them_or_no_field():
    """Parts without alarms have the bytes that they had before there were any."""
    assert b"alarms" not in encode_part(PART)
    part = replace(PART, alarms=(Alarm(UNCHANGED, "model.b", nbytes=16),))
    assert encode_part(part) == encode_part(PART)[:-1] + (
        b',"alarms":[{"kind":"unchanged","tensor":"model.b","nbytes":16}]}'
    )
    assert decode_part(encode_part(part), "part") == part
    assert alarms.FEATURE in KNOWN_FEATURES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "odd"}, "an alarm of the kind 'odd'"),
        ({"tensor": "a..[b"}, "no name by the escaping rule"),
        ({"nan": -1}, "NaN, counting -1"),
        ({"inf": 2**63}, "Inf, counting of 64 bits"),
        ({"nbytes": -5}, "bytes, counting -5"),
        ({"ranks": ((0, 8),)}, "ranks out of range"),
        ({"ranks": ((3, 2),)}, "ranks out of range"),
        ({"ranks": ((2, 4), (4, 5))}, "ranks out of order"),
    ],
)
def test_what_no_ckpt_wrote_is_refused(change, words):
    """In the record and in a part, when it is read and when it is to be written."""
    record = Alarms(records.FORMAT, 300, "w7.3", 8, (replace(FOUND[0], **change),))
    with pytest.raises(BadInputError, match=words):
        encode_alarms(record)
    with pytest.raises(DamagedError, match=words):
        decode_alarms(records.encode(record), "alarms.json")
    with pytest.raises(DamagedError, match=words):
        decode_part(records.encode(replace(PART, alarms=record.alarms)), "part")


def test_other_damage():
    """Twice the same, an unknown field, no step, another format."""
    record = Alarms(records.FORMAT, 300, "w7.3", 8, FOUND)
    for bad, words in (
        (replace(record, alarms=(FOUND[1], FOUND[1])), "the same alarm twice"),
        (replace(record, attempt="7"), "the attempt '7'"),
        (replace(record, world=0), "world 0"),
        (replace(record, step=-1), "step -1"),
    ):
        with pytest.raises(DamagedError, match=words):
            decode_alarms(records.encode(bad), "alarms.json")
    raw = encode_alarms(record)
    with pytest.raises(DamagedError, match="unknown field"):
        decode_alarms(raw.replace(b'"nan"', b'"non"'), "alarms.json")
    with pytest.raises(UnsupportedFormatError):
        decode_alarms(raw.replace(b"ckpt/1", b"ckpt/9"), "alarms.json")
