"""safetensors headers: built for our raw files, and parsed strictly, in bounded time and memory.

A file is 8 bytes of little-endian header length, the header (JSON, padded with spaces), and the
payload: the tensors' bytes, row-major and little-endian, in the order of their offsets, without holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ckpt.errors import BadInputError, DamagedError, UnsupportedValueError
from ckpt.format.nodes import short

HEADER_LIMIT_NBYTES = 100_000_000  # of the JSON; safetensors' own limit
ALIGN_NBYTES = 4096
MAX_DIMS = 64  # torch's own limit
METADATA_KEY = "__metadata__"

# Every dtype of torch that can be stored -> bytes of one element, as torch counts elements.
DTYPE_NBYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # one element is a pair of 4-bit floats
    "uint1": 1, "uint2": 1, "uint3": 1, "uint4": 1, "uint5": 1, "uint6": 1, "uint7": 1,
    "int1": 1, "int2": 1, "int3": 1, "int4": 1, "int5": 1, "int6": 1, "int7": 1,
    "bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits8": 1, "bits16": 2,
}  # fmt: skip

# Those that numpy has too: only these can come back as an array.
NUMPY_DTYPES = frozenset({
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip

# Quantized tensors: their scales and zero points are no part of their bytes.
REFUSED_DTYPES = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

_ST_DTYPES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip

_ST_NBYTES = {st: DTYPE_NBYTES[dtype] for dtype, st in _ST_DTYPES.items()}


class HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor of a file, to be written: ``dtype`` and ``shape`` as safetensors has them (see ``st_dtype``)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class StoredEntry(msgspec.Struct, frozen=True):
    """One tensor of a file as parsed; it lies at ``[begin, end)`` of the payload."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def st_dtype(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """(safetensors dtype, stored shape) for a torch dtype; ("U8", (nbytes,)) for one that safetensors lacks.

    Raises UnsupportedValueError for a dtype that cannot be stored.
    """
    if dtype not in DTYPE_NBYTES:
        why = "a quantized dtype, whose scales are not in its bytes" if dtype in REFUSED_DTYPES else "unknown to ckpt/1"
        raise UnsupportedValueError(f"dtype {dtype} cannot be stored: it is {why}; convert the tensor first")
    stored = _ST_DTYPES.get(dtype)
    return (stored, tuple(shape)) if stored else ("U8", (math.prod(shape) * DTYPE_NBYTES[dtype],))


def build_header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str], align: int = ALIGN_NBYTES) -> bytes:
    """Length field and JSON, padded with spaces so that the payload starts at a multiple of ``align``.

    The payload is the entries in their order. Raises BadInputError for a header beyond 100 MB,
    a key twice, or an entry whose bytes are not its shape's.
    """
    header: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        expected = math.prod(entry.shape) * _ST_NBYTES[entry.dtype]
        if entry.nbytes != expected:
            raise BadInputError(
                f"tensor {entry.key!r}: {entry.nbytes} bytes for {entry.dtype} {list(entry.shape)}, expected {expected}"
            )
        if entry.key in header or entry.key == METADATA_KEY:
            raise BadInputError(f"tensor {entry.key!r}: its key is taken or reserved")
        span = [offset, offset + entry.nbytes]
        header[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
        offset += entry.nbytes
    text = msgspec.json.encode(header)
    padding = -(8 + len(text)) % align
    if len(text) + padding > HEADER_LIMIT_NBYTES:
        raise BadInputError(
            f"a safetensors header of {len(text)} bytes for {len(entries)} tensors; "
            f"safetensors allows {HEADER_LIMIT_NBYTES}, so save with more ranks or shorter names"
        )
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding


def header_nbytes(first_8: bytes, file_nbytes: int, where: str) -> int:
    """Bytes of length field and header together, from the first 8 bytes of a file; for who reads the header next.

    Raises DamagedError when the file cannot hold it, or it is beyond 100 MB.
    """
    if len(first_8) < 8 or file_nbytes < 8:
        raise DamagedError(f"{where}: {min(len(first_8), file_nbytes)} bytes, too short for a safetensors file")
    length: int = struct.unpack("<Q", first_8[:8])[0]
    if length > HEADER_LIMIT_NBYTES:
        raise DamagedError(f"{where}: a header of {length} bytes; safetensors allows {HEADER_LIMIT_NBYTES}")
    if 8 + length > file_nbytes:
        raise DamagedError(f"{where}: a header of {length} bytes in a file of {file_nbytes}")
    return 8 + length


def parse_header(raw: bytes, file_nbytes: int, where: str) -> tuple[dict[str, str], list[StoredEntry]]:
    """(metadata, entries in payload order) of a file that starts with ``raw`` and has ``file_nbytes`` bytes.

    ``raw`` holds at least the length field and the header. Raises DamagedError for anything that is
    not a complete, gapless safetensors header in dtypes that ``ckpt/1`` writes.
    """
    size = header_nbytes(raw, file_nbytes, where)
    if len(raw) < size:
        raise DamagedError(f"{where}: {len(raw)} bytes read of a header of {size}")
    text = raw[8:size]
    if not text.startswith(b"{"):
        raise DamagedError(f"{where}: the header does not start with '{{'")
    try:
        header = json.loads(text.rstrip(b" ").decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise DamagedError(f"{where}: not a readable safetensors header ({error})") from None
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DamagedError(f"{where}: {METADATA_KEY} is not an object of strings")
    entries = sorted((_entry(key, node, where) for key, node in header.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise DamagedError(
                f"{where}: tensor {entry.key[:200]!r} starts at {entry.begin}, expected {position}: it {kind}"
            )
        position = entry.end
    if position != file_nbytes - size:
        raise DamagedError(f"{where}: tensors of {position} bytes in a payload of {file_nbytes - size}")
    return metadata, entries


def _entry(key: str, node: Any, where: str) -> StoredEntry:
    at = f"{where}: tensor {key[:200]!r}"
    if not isinstance(node, dict) or node.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{at}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = node["dtype"], node["shape"], node["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ST_NBYTES:
        raise DamagedError(f"{at}: unknown dtype {short(dtype)}; expected one of {', '.join(_ST_NBYTES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise DamagedError(f"{at}: its shape is not a list of at most {MAX_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise DamagedError(f"{at}: its data_offsets are not two sizes")
    begin, end = offsets
    expected = math.prod(shape) * _ST_NBYTES[dtype]
    if end - begin != expected:
        raise DamagedError(f"{at}: spans {begin} to {end}, but {dtype} {shape} has {expected} bytes")
    return StoredEntry(key, dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:200]!r} twice")
        found[key] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}")
