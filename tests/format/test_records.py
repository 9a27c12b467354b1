"""ckpt.format.records and writer: strict JSON records, and the writer's."""

from __future__ import annotations

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import BadInputError, DamagedError, UnsupportedFormatError
from ckpt.format import records
from ckpt.format.writer import Writer, decode_writer, encode_writer, parse_writer_name, writer_key

WRITER = Writer("ckpt/1", 7, "2b0e", "job 12", "node-3", 4711, 8, 200, 1_700_000_000.25)
RAW = encode_writer(WRITER)
PLAIN = RAW[: RAW.rindex(b',"digest"')] + b"}"  # as the first versions wrote it: nothing pins its fields
KEY = "run/writers/000007.json"


def test_digest():
    """xxh3-128 with seed 0, in the hex that xxhash itself prints; the empty digest is a known constant."""
    assert records.digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert records.digest(memoryview(b"ckpt")) == xxhash.xxh3_128(b"ckpt", seed=0).hexdigest()
    assert records.digest(b"ckpt") == f"{xxhash.xxh3_128_intdigest(b'ckpt'):032x}"


@pytest.mark.parametrize("bad", ["", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 31 + "\n", "é" * 32])
def test_many_digests_are_checked_as_one_is(bad):
    """Each must be one by itself: what one lacks is not made up for by its neighbour."""
    good = records.digest(b"")
    records.check_digests([good] * 3, KEY, ["one", "two", "three"])
    records.check_digests([], KEY, [])
    for texts in ([good, bad], [good, bad, "a" * (64 - len(bad))]):
        with pytest.raises(DamagedError, match="of two; expected 32 lower-case hex characters"):
            records.check_digests(texts, KEY, ["one", "two", "three"][: len(texts)])


def test_writer_round_trip():
    """A writer record comes back, and is written the same way each time."""
    assert decode_writer(RAW, KEY) == WRITER
    assert encode_writer(WRITER) == RAW
    first = msgspec.structs.replace(WRITER, number=1, resumed_from=None)
    assert decode_writer(encode_writer(first), KEY) == first


def test_other_json_of_the_same_record():
    """Another writer may space and order its JSON as it likes."""
    fields = msgspec.json.decode(RAW)
    del fields["digest"]  # which is of the bytes as they are
    spaced = msgspec.json.format(msgspec.json.encode(fields), indent=2)
    backwards = msgspec.json.encode(dict(reversed(fields.items())))
    assert decode_writer(spaced, KEY) == WRITER
    assert decode_writer(backwards, KEY) == WRITER


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not a readable ckpt record"),
        (RAW[:-1], "not a readable ckpt record"),
        (RAW + b"x", "not a readable ckpt record"),
        (b"\xff" + RAW, "not a readable ckpt record"),
        (b"[]", "not a readable ckpt record"),
        (b'{"a":' * 100_000, "not a readable ckpt record"),
        (PLAIN.replace(b'"pid":4711', b'"pid":4711,"pid":4711'), "the field 'pid' twice"),
        (PLAIN.replace(b'"pid":4711', b'"pid":4711,"more":{"a":1,"a":1}'), "not a readable Writer record"),
        (PLAIN.replace(b'"pid":4711,', b""), "missing required field `pid`"),
        (PLAIN.replace(b'"pid":4711', b'"pid":"4711"'), "Expected `int`, got `str`"),
        (PLAIN.replace(b'"pid":4711', b'"pid":true'), "Expected `int`, got `bool`"),
        (PLAIN.replace(b'"pid":4711', b'"pid":NaN'), "not a readable ckpt record"),
        (PLAIN.replace(b'"pid":4711', b'"pid":-1'), "pid -1; expected 0 to"),
        (PLAIN.replace(b'"pid":4711', b'"pid":' + b"9" * 5000), "."),
        (PLAIN.replace(b'"number":7', b'"number":0'), "writer number 0; expected 1 to"),
        (PLAIN.replace(b'"number":7', b'"number":99999999999999999999'), "writer number of 67 bits"),
        (PLAIN.replace(b'"world":8', b'"world":-8'), "world -8; expected 0"),
        (PLAIN.replace(b'"world":8', b'"world":99999999'), "world 99999999; expected 0"),
        (PLAIN.replace(b'"resumed_from":200', b'"resumed_from":-1'), "resumed_from -1"),
        (
            PLAIN.replace(b'"resumed_from":200', b'"resumed_from":null').replace(b'"world":8', b'"world":0'),
            "a rollback",
        ),
        (PLAIN.replace(b"1700000000.25", b"1e999"), "."),
        (PLAIN.replace(b"1700000000.25", b"1e300"), "created_unix_s 1e"),
        (PLAIN.replace(b"1700000000.25", b"-5.5"), "created_unix_s -5.5"),
        (PLAIN.replace(b"job 12", b"j" * 5000), "job of 5000 characters"),
    ],
)
def test_writer_refuses(raw, words):
    """A damaged or impossible record is refused, naming its key."""
    with pytest.raises(DamagedError, match=words) as caught:
        decode_writer(raw, KEY)
    assert str(caught.value).startswith(f"{KEY}: ")
    assert len(str(caught.value)) < 1000


def test_a_writer_record_pins_itself():
    """No bit of it can flip unseen; the first versions wrote no digest, and are read."""
    for position in range(len(RAW)):
        for bit in range(8):
            altered = bytearray(RAW)
            altered[position] ^= 1 << bit
            with pytest.raises((DamagedError, UnsupportedFormatError)):
                decode_writer(bytes(altered), KEY)
    assert decode_writer(PLAIN, KEY) == WRITER


@pytest.mark.parametrize("version", [b'"ckpt/2"', b'"x"', b"7", b"null", b'["ckpt/1"]'])
def test_other_versions(version):
    """A record of another version is not damage: another reader is needed."""
    with pytest.raises(UnsupportedFormatError, match="this reader knows 'ckpt/1'"):
        decode_writer(PLAIN.replace(b'"ckpt/1"', version), KEY)


def test_nothing_is_written_that_nothing_reads():
    """What every reader would refuse is refused at writing."""
    with pytest.raises(BadInputError, match="the Writer record to be written: writer number 0"):
        encode_writer(msgspec.structs.replace(WRITER, number=0))


def test_writer_names():
    """Writers are numbered in their file names; other names are no writers."""
    assert writer_key(7) == "writers/000007.json"
    assert writer_key(12345678) == "writers/12345678.json"
    assert parse_writer_name("000007.json") == 7
    assert parse_writer_name("12345678.json") == 12345678
    for name in (
        "7.json",
        "0000007.json",
        "000007.JSON",
        "000007.json.tmp",
        "\u0660\u0660\u0660\u0660\u0660\u0667.json",
        "9" * 5000 + ".json",
        "",
        "\n",
    ):
        assert parse_writer_name(name) is None


@given(st.binary(max_size=200))
def test_any_bytes(raw):
    """Whatever the bytes, the answer is an error of ckpt's."""
    with pytest.raises((DamagedError, UnsupportedFormatError)):
        decode_writer(raw, KEY)
