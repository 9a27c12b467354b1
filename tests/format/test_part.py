"""ckpt.format.part: what one rank contributed, with names that cannot leave the step."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ckpt.errors import BadInputError, DamagedError
from ckpt.format import records
from ckpt.format.part import DataFile, PackedChunk, Part, RankTensor, data_name, decode_part, encode_part, part_name

D = "d" * 32
RAW = DataFile("model", "model-00003-of-00008.safetensors", 4096 + 100, "raw", 4096, D, (D, D))
PACK = DataFile(
    "state", "state-00003-of-00008.pack", 30, "zstd", 0, "", (),
    (PackedChunk(D, 0, 10, "zstd"), PackedChunk(D, 10, 20, "raw")),
)  # fmt: skip
PART = Part(
    "ckpt/1", 300, "w7.3", 3, 8, D, (RAW, PACK), (RankTensor("state.rng", "uint8", (5,)),),
    {"epoch": 3, "state": {"t": "dict", "v": []}}, {"epoch": D}, {"rng": [1]},
)  # fmt: skip
WHERE = "run/step-00000300-w7.3/part-00003-of-00008.json"


def test_round_trip():
    """A part comes back, with and without values; packed chunks are small arrays."""
    raw = encode_part(PART)
    assert decode_part(raw, WHERE) == PART
    assert f'["{D}",10,20,"raw"]'.encode() in raw
    later = replace(PART, values=None)
    assert decode_part(encode_part(later), WHERE) == later


def test_names():
    """Names come from group, rank, world and encoding alone."""
    assert part_name(3, 8) == "part-00003-of-00008.json"
    assert data_name("model", 3, 8, "raw") == "model-00003-of-00008.safetensors"
    assert data_name("state", 123456, 234567, "zstd") == "state-123456-of-234567.pack"


def file(**change):
    return {"files": (replace(RAW, **change), PACK)}


def pack(**change):
    return {"files": (RAW, replace(PACK, **change))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step -1"),
        ({"step": 2**80}, "step of 81 bits"),
        ({"attempt": "7.3"}, "the attempt '7.3'"),
        ({"world": 0, "rank": 0}, "world 0"),
        ({"rank": 8}, "rank 8; expected 0 to 7"),
        ({"rank": -1}, "rank -1"),
        ({"layout": "../x"}, "the digest '../x' of its layout"),
        ({"files": (RAW, RAW)}, "files of the groups"),
        ({"files": (PACK, RAW)}, "files of the groups"),
        (file(group="models"), "files of the groups"),
        (file(name="../model-00003-of-00008.safetensors"), "the file '../model"),
        (file(name="/etc/passwd"), "the file '/etc/passwd'"),
        (file(name="model-00002-of-00008.safetensors"), "the file 'model-00002"),
        (file(name="model-00003-of-00008.pack"), "the file"),
        (file(name="model-00003-of-00008.safetensors\0"), "the file"),
        (file(name="COMMIT"), "the file 'COMMIT'"),
        (file(encoding="lz4"), "of encoding 'lz4'"),
        (file(encoding="lz4", name="model-00003-of-00008.pack"), "of encoding 'lz4'"),
        (file(nbytes=-1), "bytes -1"),
        (file(nbytes=4000), "payload bytes -96"),
        (file(nbytes=2**64), "bytes of 65 bits"),
        (file(header_nbytes=0), "header bytes 0; expected 8"),
        (file(header_nbytes=10**9, nbytes=10**10), "header bytes 1000000000"),
        (file(header_digest="x"), "the digest 'x' of its header"),
        (file(chunks=(D, "D" * 32)), "the digest 'DDD"),
        (file(chunks=()), "chunks, counting 0; expected 1 to 100"),
        (file(chunks=(D,) * 101), "chunks, counting 101"),
        (file(nbytes=4096), "chunks, counting 2; expected 0 to 0"),
        (file(packed=PACK.packed), "packed chunks of a raw file"),
        (pack(header_nbytes=4096), "of a pack"),
        (pack(chunks=(D,)), "of a pack"),
        (pack(header_digest=D), "of a pack"),
        (pack(nbytes=31), "chunks of 30 bytes; expected the file's 31"),
        (pack(nbytes=10, packed=PACK.packed[1:]), "does not start where the one before it ends; expected offset 0"),
        (pack(packed=(PACK.packed[0], PackedChunk(D, 9, 21, "raw"))), "expected offset 10"),
        (pack(packed=(PACK.packed[0], PackedChunk(D, 2**70, 20, "raw"))), "expected offset 10"),
        (pack(packed=(PACK.packed[0], PackedChunk(D, 10, 0, "raw"))), "bytes of a chunk 0"),
        (pack(packed=(PACK.packed[0], PackedChunk(D, 10, -20, "raw"))), "bytes of a chunk -20"),
        (pack(packed=(PackedChunk(D, 0, 2**25, "zstd"),), nbytes=2**25), "bytes of a chunk 33554432"),
        (pack(packed=(PackedChunk(D, 0, 30, "gzip"),)), "a chunk of encoding 'gzip'"),
        (pack(packed=(PackedChunk("", 0, 30, "zstd"),)), "the digest '' of a chunk"),
        ({"rank_tensors": PART.rank_tensors * 2}, "two tensors of its own with one name"),
        ({"rank_tensors": (RankTensor("a..b", "uint8", (5,)),)}, "no name by the escaping rule"),
        ({"rank_tensors": (RankTensor("a", "uint9", (5,)),)}, "the dtype 'uint9'"),
        ({"rank_tensors": (RankTensor("a", "uint8", (-5,)),)}, "a dimension of size -5"),
        ({"rank_tensors": (RankTensor("a", "uint8", (5,), "object"),)}, "the kind 'object'"),
        ({"values_digests": {"epoch": "1"}}, "the digest '1' of the value 'epoch'"),
    ],
)
def test_refuses(change, words):
    """An impossible part is refused, naming its key; nor is one ever written."""
    wrong = replace(PART, **change)
    with pytest.raises(DamagedError, match=words) as caught:
        decode_part(records.encode(wrong), WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    with pytest.raises(BadInputError, match=words):
        encode_part(wrong)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"rank":3', b'"rank":3,"rank":4', "the field 'rank' twice"),
        (b'"epoch":3', b'"epoch":3,"epoch":4', "the field 'epoch' twice"),
        (b'"rank":3', b'"rank":3.0', "not a readable Part record"),
        (b'"rank":3', b'"rank":NaN', "not a readable ckpt record"),
        (b'"rank":3', b'"rank":3,"extra":1', "unknown field `extra`"),
        (b'"values":{', b'"values":[],"x":{', "not a readable Part record"),
        (b'"epoch":3', b'"epoch":' + b"[" * 100_000, "not a readable"),
        (b'"zstd"]', b'"zstd","more"]', "not a readable Part record"),
    ],
)
def test_refuses_json(old, new, words):
    """So is JSON that says a thing twice, says it in another type, or says more."""
    raw = encode_part(PART)
    assert old in raw
    with pytest.raises(DamagedError, match=words):
        decode_part(raw.replace(old, new), WHERE)
