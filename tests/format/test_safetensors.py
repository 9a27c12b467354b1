"""ckpt.format.safetensors: headers that the real library reads, and a strict parser."""

from __future__ import annotations

import json
import struct

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import BadInputError, DamagedError, UnsupportedValueError
from ckpt.format import safetensors as ours
from ckpt.format.safetensors import (
    DTYPE_NBYTES,
    NUMPY_DTYPES,
    REFUSED_DTYPES,
    HeaderEntry,
    build_header,
    header_nbytes,
    parse_header,
    st_dtype,
)


def test_every_torch_dtype_is_known():
    """Each dtype of the installed torch is in the table with its size, or in the refused set."""
    found = {
        str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
    }
    assert set(found) - REFUSED_DTYPES <= set(DTYPE_NBYTES)
    assert not REFUSED_DTYPES & set(DTYPE_NBYTES)
    assert {name: dtype.itemsize for name, dtype in found.items() if name in DTYPE_NBYTES} == {
        name: nbytes for name, nbytes in DTYPE_NBYTES.items() if name in found
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch warns of complex32
def test_numpy_dtypes():
    """The dtypes that may be arrays are those that torch and numpy share."""
    shared = set()
    for name in DTYPE_NBYTES:
        try:
            torch.zeros(1, dtype=getattr(torch, name)).numpy()
        except (TypeError, RuntimeError):
            continue
        shared.add(name)
    assert shared == NUMPY_DTYPES


def test_the_real_library_reads_our_files(tmp_path):
    """Every dtype, an empty tensor and a scalar come back through safe_open bit for bit, page-aligned."""
    tensors = {}
    for name, nbytes in DTYPE_NBYTES.items():
        raw = torch.arange(24, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(100, 124, dtype=torch.uint8)
        tensors[name] = (name, (24 // nbytes,), raw[: 24 // nbytes * nbytes])
    tensors["matrix"] = ("int16", (3, 4), torch.arange(24, dtype=torch.uint8))
    tensors["scalar"] = ("float32", (), torch.arange(4, dtype=torch.uint8))
    tensors["empty"] = ("bfloat16", (0, 3), torch.empty(0, dtype=torch.uint8))
    entries, payload = [], b""
    for key, (dtype, shape, raw) in tensors.items():
        kind, stored = st_dtype(dtype, shape)
        entries.append(HeaderEntry(key, kind, stored, len(raw)))
        payload += raw.numpy().tobytes()
    header = build_header(entries, {"format": "pt"})
    assert len(header) % 4096 == 0
    path = tmp_path / "file.safetensors"
    path.write_bytes(header + payload)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for key, (dtype, shape, raw) in tensors.items():
            tensor = file.get_tensor(key)
            if st_dtype(dtype, shape)[0] != "U8":
                assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
            elif dtype != "uint8":
                assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (len(raw),))
            assert tensor.reshape(-1).view(torch.uint8).equal(raw) if tensor.numel() else len(raw) == 0
    metadata, found = parse_header(header, len(header) + len(payload), "file")
    assert metadata == {"format": "pt"}
    assert [(e.key, e.dtype, e.shape, e.end - e.begin) for e in found] == [
        (e.key, e.dtype, e.shape, e.nbytes) for e in sorted(entries, key=lambda e: [x.key for x in found].index(e.key))
    ]


def test_we_read_the_real_library(tmp_path):
    """The strict parser takes what safetensors itself writes."""
    path = tmp_path / "file.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3), "b.c": torch.zeros(2, 5, dtype=torch.bfloat16)}, path, {"x": "é"})
    raw = path.read_bytes()
    metadata, entries = parse_header(raw, len(raw), "file")
    assert metadata == {"x": "é"}
    assert {entry.key: (entry.dtype, entry.shape) for entry in entries} == {"a": ("F32", (3,)), "b.c": ("BF16", (2, 5))}


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: text != "__metadata__")


@given(
    st.lists(
        st.tuples(names, st.sampled_from(sorted(DTYPE_NBYTES)), st.lists(st.integers(0, 5), max_size=3)), max_size=8
    ),
    st.sampled_from([1, 8, 4096]),
)
def test_build_then_parse(tensors, align):
    """Headers of any names, dtypes and shapes come back; offsets are running sums."""
    entries = []
    for key, dtype, shape in {key: (key, dtype, shape) for key, dtype, shape in tensors}.values():
        kind, stored = st_dtype(dtype, shape)
        nbytes = DTYPE_NBYTES[dtype]
        for size in shape:
            nbytes *= size
        entries.append(HeaderEntry(key, kind, stored, nbytes))
    header = build_header(entries, {}, align)
    assert len(header) % align == 0
    metadata, found = parse_header(header, len(header) + sum(e.nbytes for e in entries), "file")
    assert metadata == {}
    offset, spans = 0, {}
    for entry in entries:
        spans[entry.key] = (entry.dtype, entry.shape, offset, offset + entry.nbytes)
        offset += entry.nbytes
    assert {e.key: (e.dtype, e.shape, e.begin, e.end) for e in found} == spans


def test_keys_stand_in_file_order():
    """A person who looks at the header sees the tensors as they lie in the file."""
    header = build_header([HeaderEntry("z", "U8", (1,), 1), HeaderEntry("a", "U8", (2,), 2)], {"format": "pt"})
    assert list(json.loads(header[8:])) == ["__metadata__", "z", "a"]


def test_stand_ins():
    """Dtypes that safetensors lacks are stored as their bytes."""
    assert st_dtype("complex128", (2, 3)) == ("U8", (96,))
    assert st_dtype("float8_e8m0fnu", ()) == ("U8", (1,))
    assert st_dtype("float4_e2m1fn_x2", (0, 4)) == ("U8", (0,))
    assert st_dtype("bfloat16", (2, 3)) == ("BF16", (2, 3))


@pytest.mark.parametrize("dtype", [*sorted(REFUSED_DTYPES), "float128", ""])
def test_refuses_dtypes(dtype):
    """A dtype that cannot be stored is refused by name."""
    with pytest.raises(UnsupportedValueError, match=f"dtype {dtype} cannot be stored"):
        st_dtype(dtype, (1,))


def test_build_refuses(monkeypatch):
    """A key twice, a reserved key, bytes that are not the shape's, and a header beyond the limit."""
    for entries, words in (
        ([HeaderEntry("a", "U8", (1,), 1)] * 2, "taken or reserved"),
        ([HeaderEntry("__metadata__", "U8", (1,), 1)], "taken or reserved"),
        ([HeaderEntry("a", "F32", (2,), 9)], r"9 bytes for F32 \[2\], expected 8"),
    ):
        with pytest.raises(BadInputError, match=words):
            build_header(entries, {})
    monkeypatch.setattr(ours, "HEADER_LIMIT_NBYTES", 5000)
    with pytest.raises(BadInputError, match="safetensors allows 5000"):
        build_header([HeaderEntry("a" * 5000, "U8", (1,), 1)], {})


def _file(header: object, payload_nbytes: int = 8, *, length: int | None = None) -> tuple[bytes, int]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text, 8 + len(text) + payload_nbytes


def _entry(**change: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ((b"", 0), "too short"),
        ((b"1234567", 7), "too short"),
        (_file({}, 0, length=100), "a header of 100 bytes in a file of 10"),
        (_file({}, 0, length=2**64 - 1), "safetensors allows 100000000"),
        ((struct.pack("<Q", 10**9), 2 * 10**9), "safetensors allows 100000000"),
        ((struct.pack("<Q", 10) + b"{}", 100), "10 bytes read of a header of 18"),
        (_file(b" {}"), "does not start with"),
        (_file(b'{"a\xff": 1}'), "not a readable safetensors header"),
        (_file(b'{"a": '), "not a readable safetensors header"),
        (_file(b"[" * 100000), "does not start"),
        (_file(b'{"a":' * 100000), "not a readable safetensors header"),
        (_file(b'{"a": NaN}'), "the number NaN"),
        (_file(b'{"a": {"dtype":"U8","shape":[9999999999%s],"data_offsets":[0,8]}}' % (b"9" * 5000)), "not a readable"),
        (_file(b'{"a": {}, "a": {}}'), "the key 'a' twice"),
        (_file(b'{"a": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "the key 'dtype' twice"),
        (_file({"__metadata__": {"a": 1}}), "not an object of strings"),
        (_file({"__metadata__": []}), "not an object of strings"),
        (_file({"a": []}), "expected exactly dtype"),
        (_file({"a": {"dtype": "F32", "shape": [2]}}), "expected exactly dtype"),
        (_file({"a": _entry(more=1)}), "expected exactly dtype"),
        (_file({"a": _entry(dtype="F33")}), "unknown dtype 'F33'"),
        (_file({"a": _entry(dtype=7)}), "unknown dtype 7"),
        (_file({"a": _entry(shape=[-2])}), "its shape is not"),
        (_file({"a": _entry(shape=[2.0])}), "its shape is not"),
        (_file({"a": _entry(shape=[True, 2])}), "its shape is not"),
        (_file({"a": _entry(shape=[2] + [1] * 64)}), "its shape is not"),
        (_file({"a": _entry(shape=[2**63])}), "its shape is not"),
        (_file({"a": _entry(shape=2)}), "its shape is not"),
        (_file({"a": _entry(data_offsets=[-8, 0])}), "its data_offsets are not"),
        (_file({"a": _entry(data_offsets=[0])}), "its data_offsets are not"),
        (_file({"a": _entry(data_offsets=[8, 0])}), "spans 8 to 0"),
        (_file({"a": _entry(shape=[3])}), r"F32 \[3\] has 12 bytes"),
        (_file({"a": _entry(shape=[2**62, 2**62])}), "has .* bytes"),
        (_file({"a": _entry(data_offsets=[8, 16])}), "leaves a hole"),
        (_file({"a": _entry(), "b": _entry(data_offsets=[4, 12])}, 12), "overlaps"),
        (_file({"a": _entry(), "b": _entry()}), "overlaps"),
        (_file({"a": _entry(), "b": _entry(data_offsets=[9, 17])}, 17), "leaves a hole"),
        (_file({"a": _entry()}, 7), "tensors of 8 bytes in a payload of 7"),
        (_file({"a": _entry()}, 9), "tensors of 8 bytes in a payload of 9"),
        (_file({}, 1), "tensors of 0 bytes in a payload of 1"),
    ],
)
def test_parse_refuses(file, words):
    """Each malformation has its refusal, by DamagedError."""
    with pytest.raises(DamagedError, match=words):
        parse_header(*file, "model.safetensors")


def test_header_nbytes():
    """The first 8 bytes say how much to read next."""
    header = build_header([], {"format": "pt"})
    assert header_nbytes(header[:8], len(header), "file") == len(header) == 4096
