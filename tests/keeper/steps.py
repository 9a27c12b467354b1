"""Looking at what a keeper has written, as a reader would."""

from __future__ import annotations

from pathlib import Path

from ckpt.format import records
from ckpt.format.chunk import chunk_spans, decode_chunk
from ckpt.run import Run
from tests.keeper.rank_process import payload


def committed(url: str) -> list[int]:
    """The live steps."""
    return [state.attempt.step for state in Run.open(url).survey().live]


def folders(url: str) -> list[str]:
    """Attempts of which anything is left."""
    return sorted(path.name for path in Path(url).glob("step-*"))


def check_step(url: str, step: int, world: int = 1) -> None:
    """Every byte of a step is what its ranks held, and every digest is right."""
    run = Run.open(url)
    state = run.find(step)
    assert state.commit is not None
    assert state.commit.world == world
    for reference in state.commit.layouts:
        run.layout(reference.digest)
    for rank in range(world):
        part = run.part(state.attempt, state.commit, rank)
        for file in part.files:
            stored = Path(url, state.attempt.folder, file.name).read_bytes()
            assert len(stored) == file.nbytes
            if file.encoding == "raw":
                header, held = stored[: file.header_nbytes], stored[file.header_nbytes :]
                assert records.digest(header) == file.header_digest
                spans = chunk_spans(len(held))
                assert [records.digest(held[o : o + n]) for o, n in spans] == list(file.chunks)
            else:
                chunks = []
                expected = payload(step, rank, 1)
                for packed in file.packed:
                    raw = stored[packed.offset : packed.offset + packed.nbytes]
                    nbytes = next(n for n in range(1, 1 << 24) if records.digest(expected * n) == packed.digest)
                    chunks.append(decode_chunk(raw, packed.encoding, nbytes))
                held = b"".join(chunks)
            assert held == payload(step, rank, len(held))
