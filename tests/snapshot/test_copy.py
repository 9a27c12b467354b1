"""Tensors into arenas: every dtype and stride, bit for bit."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from ckpt.errors import BadInputError
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.snapshot.arena import PAGE_NBYTES, as_bytes, pin, place_files
from ckpt.snapshot.copy import copy_into, tensor_bytes

PLAIN = [torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16]


def copied(tensor: torch.Tensor, offset: int = 0) -> bytes:
    """What lies in the arena afterwards."""
    arena = memoryview(bytearray(b"\xa5" * 4096))
    cost = copy_into(arena, [(tensor, offset)])
    assert cost.nbytes == tensor.numel() * tensor.element_size()
    assert cost.seconds >= 0
    assert bytes(arena[:offset]) == b"\xa5" * offset
    assert set(arena[offset + cost.nbytes :]) == {0xA5}, "not a byte behind it is touched"
    return bytes(arena[offset : offset + cost.nbytes])


@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
@pytest.mark.parametrize("offset", [0, 64, 1])
def test_every_dtype(name: str, offset: int):
    """Random bits (NaN payloads included), every second column, at aligned and odd offsets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        dtype = getattr(torch, name)
        size = DTYPE_NBYTES[name]
        raw = torch.randint(0, 256, (4, 6, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        if dtype is torch.bool:
            raw %= 2
        tensor = raw.view(dtype).reshape(4, 6)[:, ::2]
        expected = bytes(raw[:, ::2].contiguous().flatten().tolist())
        assert copied(tensor, offset) == expected
        assert bytes(tensor_bytes(tensor)) == expected
        assert copied(tensor[1, 1], offset) == bytes(raw[1, 2].tolist())


@pytest.mark.parametrize("dtype", PLAIN)
def test_views(dtype: torch.dtype):
    """Transposed, expanded, overlapping, sliced, channels-last, flipped and 0-dim: what they show is copied."""
    base = torch.arange(120).to(dtype)
    views = {
        "transposed": base.view(10, 12).t(),
        "expanded": base[3:4].expand(5),
        "expanded in front": base[:4].expand(3, 4),
        "slice": base[7:19],
        "column": base.view(10, 12)[:, 3],
        "channels last": base.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "overlapping": base.as_strided((5, 4), (2, 1)),
        "one": base[5],
        "empty": base[:0],
        "empty matrix": base.view(10, 12)[:, :0],
    }
    for name, view in views.items():
        expected = bytes(view.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).tolist())
        assert copied(view, 16) == expected, name
        assert bytes(tensor_bytes(view)) == expected, name


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_conjugated_and_negative_views(dtype: torch.dtype):
    """Lazy conjugation and negation are in the bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        raw = torch.tensor([1 + 2j, 3 - 4j, -5 + 6j]).to(dtype)
        assert raw.conj().is_conj()
        assert copied(raw.conj()) == bytes(tensor_bytes(torch.tensor([1 - 2j, 3 + 4j, -5 - 6j]).to(dtype)))
        negative = raw.conj().imag
        assert negative.is_neg()
        real = torch.tensor([-2.0, 4.0, -6.0]).to(negative.dtype)
        assert copied(negative) == bytes(tensor_bytes(real))


def test_parameters_and_subclasses_of_tensors():
    """What requires a gradient is copied as any other; nothing is recorded."""
    weight = torch.nn.Parameter(torch.randn(3, 4))
    assert copied(weight.t()) == bytes(tensor_bytes(weight.detach().t()))
    assert weight.grad is None


def test_many_at_once():
    """Each goes to its own place, in one call."""
    arena = memoryview(bytearray(3 * PAGE_NBYTES))
    tensors = [(torch.full((100,), i, dtype=torch.int32), i * 400) for i in range(30)]
    assert copy_into(arena, tensors).nbytes == 30 * 400
    assert as_bytes(arena)[:12000].view(torch.int32).tolist() == [i for i in range(30) for _ in range(100)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(14 << 20, dtype=torch.int32),
        torch.arange(14 << 20, dtype=torch.int32).view(7 << 10, 2 << 10).t(),
        torch.arange(14 << 20, dtype=torch.int32).view(1, 2, 7 << 20).transpose(1, 2).expand(2, 7 << 20, 2),
        torch.arange(7 << 20, dtype=torch.float64).to(torch.complex128),
    ],
)
def test_progress(tensor: torch.Tensor):
    """Every 16 MiB or so it is told how much of the arena is final, and so it is at that moment."""
    size = tensor.numel() * tensor.element_size()
    arena, small = memoryview(bytearray(size + 400)), torch.ones(100, dtype=torch.int32)
    expected = bytes(tensor_bytes(tensor.contiguous()))
    told: list[int] = []

    def progress(nbytes: int) -> None:
        assert arena[400:nbytes] == expected[: nbytes - 400]
        told.append(nbytes)

    copy_into(arena, [(small, 0), (tensor, 400)], progress)
    assert arena[400:] == expected
    assert told == sorted(told)
    assert len(told) == size // (16 << 20) or max(b - a for a, b in itertools.pairwise([0, *told, size])) < 32 << 20
    with pytest.raises(BadInputError, match="a tensor for byte 0 comes after those that end at"):
        copy_into(arena, [(tensor, 400), (small, 0)], progress)


def test_what_has_no_bytes_is_refused():
    """Meta and sparse tensors cannot be copied; the message says which."""
    arena = memoryview(bytearray(100))
    with pytest.raises(BadInputError, match=r"a meta tensor of shape \(2, 3\)"):
        copy_into(arena, [(torch.empty(2, 3, device="meta"), 0)])
    with pytest.raises(BadInputError, match="sparse_coo"):
        copy_into(arena, [(torch.eye(3).to_sparse(), 0)])


@pytest.mark.parametrize("offset", [-1, 97, 1000])
def test_outside_of_the_arena(offset: int):
    """No byte is written outside."""
    with pytest.raises(BadInputError, match="outside of an arena of 100"):
        copy_into(memoryview(bytearray(100)), [(torch.zeros(4, dtype=torch.uint8), offset)])


def test_files_begin_on_pages():
    """Offsets are multiples of a page and do not overlap."""
    assert place_files([10, 4096, 0, 4097]) == ([0, 4096, 8192, 8192], 16384)
    assert place_files([]) == ([], 0)


def test_without_a_gpu_nothing_is_pinned():
    """``pin`` says so, and copies work all the same."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not pin(memoryview(bytearray(4096)))
    assert as_bytes(memoryview(b"")).numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_from_a_gpu():
    """Contiguous and strided device tensors, into a pinned arena, behind work that is still queued."""
    import os

    from ckpt.keeper.mapping import Mapping

    fd = os.memfd_create("test")
    os.ftruncate(fd, 64 << 20)
    mapping = Mapping(fd, 64 << 20)
    os.close(fd)
    source = torch.randn(1024, 4096, device="cuda")
    for _ in range(50):
        source = source @ torch.randn(4096, 4096, device="cuda") * 0.01
    assert copy_into(mapping.view, [(source, 0), (source.t(), 32 << 20)]).nbytes == 32 << 20
    assert pin(mapping.view)
    assert bytes(mapping.view[: 16 << 20]) == bytes(tensor_bytes(source))
    assert bytes(mapping.view[32 << 20 : 48 << 20]) == bytes(tensor_bytes(source.t()))
