"""Tensors of every form: what is seen of them is stored, and what has no plain form is refused by name."""

from __future__ import annotations

import pytest
import torch

from ckpt.errors import UnsupportedValueError
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.state import flatten
from tests.state.steps import assert_same, save

STORABLE = [name for name in DTYPE_NBYTES if isinstance(getattr(torch, name, None), torch.dtype)]

UNCOPYABLE = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}  # torch itself cannot clone them


def s02_state():
    base = torch.arange(1e6)
    return {
        "slice": base[:10],
        "column": base.view(1000, 1000)[:, 3],
        "transposed": torch.arange(24.0).view(4, 6).t(),
        "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0]).expand(5),
        "left": base[0:100],
        "right": base[50:150],
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "diagonal": torch.arange(9.0).view(3, 3).diagonal(),
    }


def test_s02_views_store_what_they_show():
    """Strided, expanded, overlapping and conjugated views: equal values, never the base behind them."""
    step = save(s02_state())
    assert step.nbytes < 64 * 1024
    found = step.read()
    for name, tensor in s02_state().items():
        assert torch.equal(found[name], tensor), name
    found["left"][60] = -1
    assert found["right"][10] == 60


def test_s02_views_as_targets():
    """A view is filled in place, through its strides; one that shows an element twice is replaced."""
    state, bases = s02_state(), {}
    for name, tensor in state.items():
        bases[name] = tensor
        if name != "expanded":
            tensor.fill_(7)
    save(s02_state()).load(state)
    for name, tensor in s02_state().items():
        assert torch.equal(state[name], tensor), name
        assert (state[name] is bases[name]) == (name not in {"expanded", "conj", "neg"}), name


def test_s03_scalars_and_single_elements():
    """Shape (), dtype and bits are kept."""
    state = {
        "a": torch.tensor(3.5),
        "b": torch.tensor(7),
        "nan": torch.tensor(float("nan")),
        "zero": torch.tensor(-0.0),
        "p": torch.nn.Parameter(torch.tensor([2.0])),
        "one": torch.ones(1, 1),
        "true": torch.tensor(True),
        "empty": torch.empty(0),
        "empty3": torch.empty(0, 3, dtype=torch.int8),
    }
    found = save(state).read()
    assert_same(found, {**state, "p": state["p"].detach()})
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    save(state).load(target)
    assert_same(target, found)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", STORABLE)
def test_s05_every_dtype(name):
    """Every dtype of torch keeps its bits, NaN payloads too, new and in place."""
    dtype = getattr(torch, name)
    raw = torch.arange(48, dtype=torch.uint8) * 11 % (2 if name == "bool" else 251)
    tensor = raw.view(dtype)
    leaf = flatten({"t": tensor}, rank=0, world=1).tensors[0]
    assert (leaf.what.dtype, leaf.what.shape) == (name, tuple(tensor.shape))
    assert leaf.tensor.view(torch.uint8).tolist() == raw.tolist()
    if name in UNCOPYABLE:
        return
    step = save({"t": tensor})
    assert step.read()["t"].view(torch.uint8).tolist() == raw.tolist()
    target = {"t": torch.zeros(48, dtype=torch.uint8).view(dtype)}
    step.load(target)
    assert target["t"].view(torch.uint8).tolist() == raw.tolist()


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Bare(torch.nn.Parameter):
    """A subclass that adds nothing."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (lambda: torch.ones(3).as_subclass(Wrapped), "class .*Wrapped"),
        (lambda: torch.nn.UninitializedParameter(), "not initialized"),
    ],
)
def test_tensors_without_a_plain_form_are_refused(make, words):
    """By name, before anything is written."""
    with pytest.raises(UnsupportedValueError, match=rf"deep\.w: .*{words}"):
        flatten({"deep": {"w": make()}}, rank=0, world=1)


def test_a_subclass_that_adds_nothing_is_a_tensor():
    """A class of parameters without state or overrides is stored as what it is."""
    parameter = Bare(torch.ones(2))
    assert_same(save({"p": parameter}).read(), {"p": torch.ones(2)})
    parameter.quant_state = object()
    with pytest.raises(UnsupportedValueError, match=r"p: a tensor of class .*Bare"):
        flatten({"p": parameter}, rank=0, world=1)


def test_parameters_are_detached_and_keep_requires_grad():
    """A leaf needs no graph, and a target keeps what it is."""
    p = torch.nn.Parameter(torch.ones(2))
    assert not flatten({"p": p}, rank=0, world=1).tensors[0].tensor.requires_grad
    target = torch.nn.Parameter(torch.zeros(2))
    state = {"p": target}
    save({"p": p}).load(state)
    assert state["p"] is target
    assert target.requires_grad
    assert target.tolist() == [1, 1]


def test_a_meta_tensor_is_replaced():
    """It has no memory to fill."""
    state = {"w": torch.empty(3, device="meta"), "p": torch.nn.Parameter(torch.empty(2, device="meta"))}
    save({"w": torch.arange(3.0), "p": torch.ones(2)}).load(state)
    assert_same(state["w"], torch.arange(3.0))
    assert isinstance(state["p"], torch.nn.Parameter)
