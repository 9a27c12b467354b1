"""Reading plans: a chunk's flat range of a piece, scattered into any target, gives the target's own elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt.plan.load as plan_load
from ckpt.plan.boxes import Box
from ckpt.plan.files import Entry
from ckpt.plan.load import Placed, entry_reads, flat_range_boxes

boxes_1_to_3d = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=3).map(
    lambda pairs: Box(tuple(a for a, _ in pairs), tuple(n for _, n in pairs))
)


@given(boxes_1_to_3d, st.data())
@settings(max_examples=300, deadline=None)
def test_flat_range_boxes_are_the_range(piece: Box, data: st.DataObject) -> None:
    """In order, whole, and never more than 2 * ndim - 1 of them."""
    start = data.draw(st.integers(0, piece.numel))
    stop = data.draw(st.integers(start, piece.numel))
    flat = np.arange(piece.numel).reshape(piece.sizes)
    found: list[int] = []
    boxes = list(flat_range_boxes(piece, start, stop))
    for position, box in boxes:
        inner = box.relative_to(piece)
        part = flat[tuple(slice(a, a + n) for a, n in zip(inner.offsets, inner.sizes, strict=True))]
        assert part.ravel()[0] == position
        found.extend(part.ravel().tolist())
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(piece.sizes) - 1


@given(boxes_1_to_3d, st.integers(1, 7), st.data())
@settings(max_examples=300, deadline=None)
def test_entry_reads_fill_exactly_the_common_box(piece: Box, chunk_elements: int, data: st.DataObject) -> None:
    """Executing the plan with numpy fills what piece and need share, and nothing else."""
    offsets = tuple(
        data.draw(st.integers(max(0, a - 2), a + n)) for a, n in zip(piece.offsets, piece.sizes, strict=True)
    )
    need = Box(offsets, tuple(data.draw(st.integers(1, 6)) for _ in offsets))
    entry = Entry("t", "t", "state", "int32", "tensor", piece, 0, piece.numel * 4, whole=False)
    stored = np.arange(1, piece.numel + 1, dtype=np.int32)
    target = np.zeros(need.sizes, dtype=np.int32)

    spans = [(i * 4, min(chunk_elements, piece.numel - i) * 4) for i in range(0, piece.numel, chunk_elements)]
    original = plan_load.chunk_spans
    plan_load.chunk_spans = lambda _: spans  # small chunks, so that rows are cut  # type: ignore[assignment]
    try:
        reads = list(entry_reads(0, Placed(entry, 0), need))
    finally:
        plan_load.chunk_spans = original
    for read in reads:
        chunk = stored[read.offset // 4 : (read.offset + read.nbytes) // 4]
        if read.target_offset is not None:
            target.ravel()[read.target_offset // 4 :][: len(chunk)] = chunk
        for copy in read.copies:
            source = chunk[copy.start : copy.start + copy.source.numel].reshape(copy.source.sizes)
            a, b = copy.box.relative_to(copy.source), copy.box.relative_to(need)
            target[_slices(b)] = source[_slices(a)]
    expected = np.zeros(need.sizes, dtype=np.int32)
    common = piece.intersect(need)
    if common is not None:
        expected[_slices(common.relative_to(need))] = stored.reshape(piece.sizes)[_slices(common.relative_to(piece))]
    assert np.array_equal(target, expected)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
