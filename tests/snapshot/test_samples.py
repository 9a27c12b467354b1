"""ckpt.snapshot.samples: in time every byte is looked at, and the same ones whatever the strides."""

from __future__ import annotations

import pytest
import torch

from ckpt.snapshot.samples import PLACES, WINDOW_NBYTES, sample, spans


@pytest.mark.parametrize("nbytes", [0, 1, 2048, 2049, 3072, 10_000, 123_456])
def test_every_byte_has_its_turn(nbytes):
    """After as many turns as there are windows for each place, wherever it began."""
    turns = nbytes // WINDOW_NBYTES // PLACES + 1
    for first in (0, 7):
        seen = {byte for turn in range(first, first + turns) for a, b in spans(nbytes, turn) for byte in range(a, b)}
        assert seen == set(range(nbytes))
    assert all(sum(b - a for a, b in spans(nbytes, turn)) <= PLACES * WINDOW_NBYTES for turn in range(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.bool])
def test_strides_do_not_matter(dtype):
    """What is transposed, expanded or strided gives the bytes that it shows."""
    base = torch.randint(0, 200, (70, 300)).to(dtype)
    for tensor in (base.t(), base[:, ::3], base[:1].expand(90, 300), base[3], base[3:3], base[:, :2]):
        for turn in (0, 1, 5):
            assert sample([tensor], turn) == sample([tensor.contiguous()], turn)
    whole = sample([base[0].contiguous()[:50]], 3)[0]
    assert whole == base[0, :50].contiguous().view(torch.uint8).numpy().tobytes()


def test_a_change_is_in_the_sample_of_its_turn():
    """One flipped element is in the sample when its window is looked at, and in no other turn's."""
    first, second = torch.zeros(50_000), torch.zeros(50_000)
    second[30_000] = 1
    differs = [turn for turn in range(200) if sample([first], turn) != sample([second], turn)]
    windows = -(-first.nbytes // WINDOW_NBYTES)
    expected = [t for t in range(200) if 30_000 * 4 // WINDOW_NBYTES in {t % windows, (t + windows // 2) % windows}]
    assert differs == expected
    assert differs
