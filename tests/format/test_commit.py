"""ckpt.format.commit: the record that makes a step exist."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import BadInputError, DamagedError, UnsupportedFormatError
from ckpt.format import records
from ckpt.format.commit import (
    Attempt,
    Commit,
    FileRef,
    LayoutRef,
    check_step,
    decode_commit,
    encode_commit,
    parse_folder,
)
from ckpt.format.layout import Layout, Mesh, Tensor

A, B = "a" * 32, "b" * 32
PARTS = tuple(FileRef(f"part-0000{rank}-of-00004.json", 100 + rank, f"{rank}" * 32) for rank in range(4))
COMMIT = Commit(
    "ckpt/1", 300, "w7.3", 4, ("zstd",), "ckpt 0.1.0", 1_700_000_000.5,
    (LayoutRef(A, 500, ((0, 1), (3, 3))), LayoutRef(B, 600, ((2, 2),))), PARTS,
    (FileRef("model.safetensors.index.json", 90, "c" * 32),),
)  # fmt: skip
WHERE = "run/step-00000300-w7.3/COMMIT"


def sealed(line: bytes) -> bytes:
    return line + b"\n" + records.digest(line).encode() + b"\n"


def test_round_trip():
    """COMMIT comes back; it is a line of JSON and a line with that line's digest."""
    raw = encode_commit(COMMIT)
    assert decode_commit(raw, WHERE) == COMMIT
    line, digest, rest = raw.split(b"\n")
    assert digest.decode() == records.digest(line)
    assert rest == b""
    assert msgspec.json.decode(line)["format"] == "ckpt/1"


def test_torn_or_altered():
    """Cut anywhere, longer by a byte, or with any one bit flipped, it is damaged."""
    raw = encode_commit(COMMIT)
    for length in range(len(raw)):
        with pytest.raises(DamagedError, match="torn or altered"):
            decode_commit(raw[:length], WHERE)
    with pytest.raises(DamagedError, match="torn or altered"):
        decode_commit(raw + b"\n", WHERE)
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(DamagedError, match="torn or altered"):
            decode_commit(bytes(flipped), WHERE)


def test_unknown_features_and_versions():
    """Unknown features and other versions name the version that wrote them, whatever else the record has."""
    fields = msgspec.json.decode(encode_commit(COMMIT).split(b"\n")[0])
    fields |= {"features": ["zstd", "planes"], "written_by": "ckpt 3.1", "parts": {"packed": True}, "new": 1}
    with pytest.raises(UnsupportedFormatError, match=r"unknown feature planes; it was written by ckpt 3\.1"):
        decode_commit(sealed(msgspec.json.encode(fields)), WHERE)
    fields |= {"format": "ckpt/2", "features": {"more": 1}}
    with pytest.raises(UnsupportedFormatError, match="format 'ckpt/2', this reader knows 'ckpt/1'"):
        decode_commit(sealed(msgspec.json.encode(fields)), WHERE)


def ranges(*pairs):
    return (LayoutRef(A, 500, pairs),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step -1; expected 0 to"),
        ({"step": 2**63}, "step of 64 bits"),
        ({"attempt": "w7"}, "the attempt 'w7'; expected a label like w7.3"),
        ({"attempt": "w07.3"}, "the attempt"),
        ({"attempt": "w0.1"}, "the attempt"),
        ({"attempt": "w7.0"}, "the attempt"),
        ({"attempt": "w7.3/../x"}, "the attempt"),
        ({"attempt": "w" + "9" * 5000 + ".1"}, "the attempt"),
        ({"world": 0, "parts": (), "layouts": ()}, "world 0; expected 1 to"),
        ({"world": -4}, "world -4"),
        ({"world": 3}, "3"),
        ({"world": 5}, "layouts for 4 ranks; expected for 5"),
        ({"world": 10**9}, "world 1000000000; expected 1 to"),
        ({"written_by": "x" * 5000}, "written_by of 5000"),
        ({"created_unix_s": -1.0}, "created_unix_s"),
        ({"created_unix_s": 1e18}, "created_unix_s"),
        ({"features": ("zstd", "zstd")}, "a feature twice"),
        ({"layouts": ()}, "layouts for 0 ranks; expected for 4"),
        ({"layouts": ranges((0, 2))}, "layouts for 3 ranks"),
        ({"layouts": ranges((0, 4))}, "ranks 0 to 4"),
        ({"layouts": ranges((0, 1), (3, 3))}, "next 2"),
        ({"layouts": ranges((0, 2), (2, 3))}, "ranks 2 to 3; expected each of the 4 ranks in one range"),
        ({"layouts": ranges((0, 3), (0, 3))}, "ranks 0 to 3"),
        ({"layouts": ranges((3, 0))}, "ranks 3 to 0"),
        ({"layouts": ranges((-1, 3))}, "ranks -1 to 3"),
        ({"layouts": ranges((0, 2**70))}, "an int of 71 bits"),
        ({"layouts": ranges()}, "for no rank"),
        ({"layouts": ranges((0, 1)) + ranges((2, 3))}, "a layout twice"),
        ({"layouts": (LayoutRef("../../x", 500, ((0, 3),)),)}, r"the digest '../../x' of a layout; expected 32"),
        ({"layouts": (LayoutRef("A" * 32, 500, ((0, 3),)),)}, "the digest"),
        ({"layouts": (LayoutRef(A, 0, ((0, 3),)),)}, "bytes of a layout 0"),
        ({"layouts": (LayoutRef(A, 2**40, ((0, 3),)),)}, "bytes of a layout"),
        ({"parts": PARTS[:3]}, "3 parts for a world of 4"),
        ({"parts": (PARTS[1], PARTS[0], *PARTS[2:])}, "rank 0's part 'part-00001-of-00004.json'"),
        ({"parts": (replace(PARTS[0], name="../part-00000-of-00004.json"), *PARTS[1:])}, "rank 0's part"),
        ({"parts": (replace(PARTS[0], nbytes=-1), *PARTS[1:])}, "bytes of part-00000-of-00004.json -1"),
        ({"parts": (replace(PARTS[0], nbytes=2**40), *PARTS[1:])}, "bytes of part-00000"),
        ({"parts": (replace(PARTS[0], digest="0" * 31), *PARTS[1:])}, "the digest"),
        ({"files": (FileRef("../x", 1, A),)}, "the file '../x'"),
        ({"files": (FileRef("/etc/passwd", 1, A),)}, "the file"),
        ({"files": (FileRef("a/b", 1, A),)}, "the file"),
        ({"files": (FileRef("..", 1, A),)}, "the file"),
        ({"files": (FileRef("", 1, A),)}, "the file"),
        ({"files": (FileRef("a\n", 1, A),)}, "the file"),
        ({"files": (FileRef("COMMIT", 1, A),)}, "the file 'COMMIT'"),
        ({"files": (FileRef("part-00000-of-00004.json", 1, A),)}, "the file 'part"),
        ({"files": (FileRef("a", 1, A), FileRef("a", 1, A))}, "the file 'a'"),
        ({"files": (FileRef("a", -1, A),)}, "bytes of a -1"),
        ({"files": (FileRef("a", 1, "x"),)}, "the digest 'x' of a"),
    ],
)
def test_refuses(change, words):
    """An impossible COMMIT, though sealed by its digest, is refused; nor is one ever written."""
    wrong = replace(COMMIT, **change)
    with pytest.raises(DamagedError, match=words) as caught:
        decode_commit(sealed(records.encode(wrong)), WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    with pytest.raises(BadInputError, match=words):
        encode_commit(wrong)


def test_refuses_repeated_fields():
    """A field said twice is refused: readers would differ in which they take."""
    line = encode_commit(COMMIT).split(b"\n")[0].replace(b'"step":300', b'"step":300,"step":301')
    with pytest.raises(DamagedError, match="the field 'step' twice"):
        decode_commit(sealed(line), WHERE)


@given(st.integers(0, 10**18), st.integers(1, 10**17), st.integers(1, 10**17))
def test_folders(step, writer, save):
    """An attempt's folder names it, and sorts by nothing."""
    attempt = Attempt(step, writer, save)
    assert parse_folder(attempt.folder) == attempt


def test_other_folders():
    """Names that are nearly an attempt's are no attempt."""
    assert Attempt(300, 7, 3).folder == "step-00000300-w7.3"
    for name in (
        "step-300-w7.3", "step-000000300-w7.3", "step-00000300-w07.3", "step-00000300-w7.3.tmp", "step-00000300-w7",
        "step-00000300-w0.3", "step-00000300-w7.0", "step--0000300-w7.3", "step-\u06600000300-w7.3", "x", "",
        f"step-{'9' * 5000}-w1.1", f"step-00000300-w{'9' * 5000}.1", "step-00000300-w7.3\n",
    ):  # fmt: skip
        assert parse_folder(name) is None


def test_attempts_order_by_number():
    """Steps order by number, not by text."""
    assert max(Attempt(9000, 1, 9), Attempt(10000, 1, 1), Attempt(10000, 1, 2)) == Attempt(10000, 1, 2)


# ---------------------------------------------------------------- COMMIT and its layouts together

W = Tensor("model.w", "model", "float32", (8, 2), 0, ("S0",), (0,))
MESH = Mesh((4,), (0, 1, 2, 3))


def layout(*tensors, meshes=(MESH,)):
    return Layout("ckpt/1", meshes, tensors, {})


def test_step_is_whole():
    """Ranks of two layouts may share a tensor, if both say the same of it; or one alone has its bytes."""
    plain = replace(W, name="model.b", placements=("R",), mesh=1, owners=(1, 2))
    extra = replace(W, name="model.c", placements=("R",), mesh=1)
    one = layout(W, plain, meshes=(MESH, Mesh((3,), (0, 1, 3))))
    two = layout(replace(plain, owners=(), mesh=0), extra, replace(W, mesh=1), meshes=(Mesh((1,), (2,)), MESH))
    two = layout(*(replace(t, mesh=0) if t.name == "model.c" else t for t in two.tensors), meshes=two.meshes)
    check_step(COMMIT.layouts, COMMIT.world, {A: one, B: two}, WHERE)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (layout(W), layout(replace(W, owners=())), "rank 2 in its mesh, but in none of the layouts that own it"),
        (layout(W), layout(), "rank 2 in its mesh"),
        (layout(replace(W, owners=())), layout(replace(W, owners=())), "0 ways in which its bytes are owned"),
        (layout(W), layout(replace(W, placements=("S1",))), "2 ways in which its bytes are owned"),
        (layout(W), layout(replace(W, dtype="int32")), "another group, dtype, shape or kind"),
        (layout(W), layout(replace(W, shape=(8, 3), owners=())), "another group, dtype, shape or kind"),
        (layout(W, meshes=(Mesh((1,), (4,)),)), layout(), "with rank 4; expected ranks below 4"),
    ],
)
def test_step_has_holes(one, two, words):
    """A COMMIT whose layouts leave a shard unwritten, or contradict each other, is refused."""
    with pytest.raises(DamagedError, match=words):
        check_step(COMMIT.layouts, COMMIT.world, {A: one, B: two}, WHERE)
