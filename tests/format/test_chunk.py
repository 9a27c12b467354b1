"""ckpt.format.chunk: spans, and the bounded way back from stored bytes."""

from __future__ import annotations

import threading

import pytest
import zstandard

from ckpt.errors import DamagedError
from ckpt.format.chunk import CHUNK_NBYTES, chunk_count, chunk_spans, decode_chunk, encode_zstd

TEXT = b"the same words again, " * 1000


@pytest.mark.parametrize(
    ("nbytes", "spans"),
    [
        (0, []),
        (1, [(0, 1)]),
        (CHUNK_NBYTES, [(0, CHUNK_NBYTES)]),
        (CHUNK_NBYTES + 1, [(0, CHUNK_NBYTES), (CHUNK_NBYTES, 1)]),
        (3 * CHUNK_NBYTES - 5, [(0, CHUNK_NBYTES), (CHUNK_NBYTES, CHUNK_NBYTES), (2 * CHUNK_NBYTES, CHUNK_NBYTES - 5)]),
    ],
)
def test_spans(nbytes, spans):
    """A shard is cut into chunks of 16 MiB and a rest; an empty one has none."""
    assert chunk_spans(nbytes) == spans
    assert chunk_count(nbytes) == len(spans)


def test_zstd_round_trip():
    """What is smaller encoded comes back the same; what is not is to be stored raw."""
    frame = encode_zstd(memoryview(TEXT))
    assert frame is not None
    assert len(frame) < len(TEXT) / 10
    assert decode_chunk(frame, "zstd", len(TEXT)) == TEXT
    assert encode_zstd(b"") is None
    assert encode_zstd(bytes(range(256))) is None
    assert decode_chunk(TEXT, "raw", len(TEXT)) == TEXT
    assert decode_chunk(b"", "raw", 0) == b""


def test_threads_have_their_own_contexts():
    """Chunks encoded and decoded by several threads at once come back right."""
    failed = []

    def work(seed: int) -> None:
        data = bytes([seed]) * 100_000 + TEXT
        for _ in range(50):
            frame = encode_zstd(data)
            if frame is None or decode_chunk(frame, "zstd", len(data)) != data:
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def _frame_claiming(nbytes: int) -> bytes:
    """A zstd frame header that claims ``nbytes`` (8-byte field), then one empty last block."""
    magic, descriptor, window = b"\x28\xb5\x2f\xfd", b"\xc0", b"\x50"
    return magic + descriptor + window + nbytes.to_bytes(8, "little") + b"\x01\x00\x00"


@pytest.mark.parametrize(
    ("raw", "encoding", "nbytes", "words"),
    [
        (b"12", "raw", 3, "2 bytes stored raw, expected 3"),
        (b"12", "lz4", 2, "unknown encoding 'lz4'"),
        (b"", "zstd", 3, "not a readable zstd frame"),
        (b"no frame", "zstd", 3, "not a readable zstd frame"),
        (_frame_claiming(10 << 30), "zstd", 100, "states 10737418240 content size, expected 100"),
        (_frame_claiming(100), "zstd", 100, "chunk:"),
        (encode_zstd(TEXT), "zstd", len(TEXT) - 1, "content size, expected"),
        (encode_zstd(TEXT)[:-5], "zstd", len(TEXT), "not a readable zstd frame"),
        (encode_zstd(TEXT) + b"behind", "zstd", len(TEXT), "chunk:"),
        (encode_zstd(TEXT) + encode_zstd(TEXT), "zstd", len(TEXT), "chunk:"),
        (
            zstandard.ZstdCompressor(write_content_size=False).compress(TEXT),
            "zstd",
            len(TEXT),
            "states no content size",
        ),
        (b"", "raw", -1, "a chunk of -1 bytes"),
        (b"", "zstd", CHUNK_NBYTES + 1, "at most 16777216"),
    ],
)
def test_refuses(raw, encoding, nbytes, words):
    """Each malformation is refused by DamagedError, without allocating what a frame claims."""
    with pytest.raises(DamagedError, match=words):
        decode_chunk(raw, encoding, nbytes)


def test_refuses_dictionaries():
    """A frame made with a dictionary is refused: it cannot be read from the step alone."""
    samples = [f"{i} {TEXT[:50]!r} {i * i}".encode() for i in range(2000)]
    compressor = zstandard.ZstdCompressor(dict_data=zstandard.train_dictionary(4096, samples))
    with pytest.raises(DamagedError, match="needs dictionary"):
        decode_chunk(compressor.compress(TEXT), "zstd", len(TEXT), "model.pack: chunk 3")
