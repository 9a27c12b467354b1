"""Chunks: at most 16 MiB of one shard's bytes, the unit of digest, encoding and reading."""

from __future__ import annotations

import threading

import zstandard

from ckpt.errors import DamagedError

CHUNK_NBYTES = 16 * 1024 * 1024
RAW = "raw"
ZSTD = "zstd"
ENCODINGS = frozenset({RAW, ZSTD})

_local = threading.local()  # zstandard contexts serve many calls, but one thread at a time


def chunk_spans(shard_nbytes: int) -> list[tuple[int, int]]:
    """(offset in the shard, nbytes) of each chunk of a shard; [] for an empty one."""
    if shard_nbytes < 0:
        raise ValueError(f"a shard of {shard_nbytes} bytes")
    return [(offset, min(CHUNK_NBYTES, shard_nbytes - offset)) for offset in range(0, shard_nbytes, CHUNK_NBYTES)]


def chunk_count(shard_nbytes: int) -> int:
    """How many chunks a shard has: ``len(chunk_spans(shard_nbytes))``."""
    return -(-shard_nbytes // CHUNK_NBYTES)


def encode_zstd(view: memoryview | bytes | bytearray, level: int = 1) -> bytes | None:
    """One chunk as one zstd frame that states its content size; None when that is not smaller (store it raw)."""
    compressors: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
    frame = compressors[level].compress(view)
    return frame if len(frame) < len(view) else None


def decode_chunk(raw: bytes | bytearray | memoryview, encoding: str, nbytes: int, where: str = "chunk") -> bytes:
    """The ``nbytes`` bytes of one chunk, from its stored bytes. Never allocates more than ``nbytes``.

    Raises DamagedError for a chunk of another size, a frame that claims another size or none,
    a frame that needs a dictionary, bytes behind the frame, and an unknown encoding.
    """
    if not 0 <= nbytes <= CHUNK_NBYTES:
        raise DamagedError(f"{where}: a chunk of {nbytes} bytes; at most {CHUNK_NBYTES} are allowed")
    if encoding == RAW:
        if len(raw) != nbytes:
            raise DamagedError(f"{where}: {len(raw)} bytes stored raw, expected {nbytes}")
        return bytes(raw)
    if encoding != ZSTD:
        raise DamagedError(f"{where}: unknown encoding {encoding!r}; expected {RAW!r} or {ZSTD!r}")
    try:
        frame = zstandard.get_frame_parameters(raw)
        if frame.content_size != nbytes:
            claim = "no" if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN else str(frame.content_size)
            raise DamagedError(f"{where}: a zstd frame that states {claim} content size, expected {nbytes}")
        if frame.dict_id:
            raise DamagedError(f"{where}: a zstd frame that needs dictionary {frame.dict_id}, expected none")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        decoded: bytes = _local.decompressor.decompress(raw, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"{where}: not a readable zstd frame ({error})") from None
    if len(decoded) != nbytes:
        raise DamagedError(f"{where}: decodes to {len(decoded)} bytes, expected {nbytes}")
    return decoded
