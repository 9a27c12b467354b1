"""Values that are not tensors, containers, arrays and objects with a state of their own."""

from __future__ import annotations

import collections
import math
from types import MappingProxyType

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import BadInputError, MismatchError, UnsupportedValueError
from ckpt.state import flatten, wanted
from tests.state.steps import Step, assert_same, assert_same_optimizer, part_of, save


def s06_state():
    return {
        "epoch": 20,
        "lr": 1e-3,
        "text": "é",
        "none": None,
        "true": True,
        "bytes": b"\x00\xff",
        "tuple": (1, "a", None),
        "list": [{"k": 1}, {"k": 2}],
        "empty_dict": {},
        "empty_list": [],
        "defaultdict": collections.defaultdict(list, x=[1]),
        "ordered": collections.OrderedDict(b=1, a=2),
        "numpy": np.float64(0.1),
        "big": 2**70,
        "inf": math.inf,
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=3),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "keys": {2: "int", True: "x", 1.5: "f", None: "n", b"b": "b", (1, "t"): "t"},
    }


def s06_template():
    template = dict.fromkeys(s06_state(), 0)
    template.update(list=[], defaultdict={"old": 1}, epoch=0, empty_list=[1, 2], empty_dict={"a": 1}, tuple=[1])
    return template


def test_s06_values_come_back_whatever_the_template_holds():
    """Counters, texts and containers are what was saved, value and type."""
    step, target = save(s06_state()), s06_template()
    found = step.load(target)
    assert_same(target, {key: s06_state()[key] for key in target})
    assert (found.missing, found.unexpected, found.mismatched, found.ignored) == ([], [], [], [])


def test_s06_values_come_back_without_a_template():
    """The same from a read."""
    assert_same(save(s06_state()).read(), s06_state())


def test_containers_keep_their_identity():
    """A dict or list of the saved type is filled in place, so that other references see the new values."""
    inner, numbers, counter = {"a": 1, "gone": 2}, [1], collections.Counter(a=1)
    state = {"cfg": {"inner": inner}, "numbers": numbers, "counter": counter}
    outer = state["cfg"]
    save({"cfg": {"inner": {"b": 3, "a": 7}}, "numbers": [1, 2, 3], "counter": collections.Counter("xx")}).load(state)
    assert state["cfg"] is outer
    assert state["cfg"]["inner"] is inner
    assert list(inner.items()) == [("b", 3), ("a", 7)]
    assert numbers == [1, 2, 3]
    assert state["numbers"] is numbers
    assert state["counter"] is counter
    assert counter == collections.Counter("xx")


def test_a_defaultdict_gets_the_saved_factory():
    """The factory is part of the value."""
    mapping = collections.defaultdict(list)
    save({"d": collections.defaultdict(int, a=1)}).load({"d": mapping})
    assert mapping["new"] == 0


def test_values_are_free_of_the_step():
    """Loading one step twice gives two states that share nothing."""
    step = save({"a": [{"b": bytearray(b"x")}]})
    first, second = {"a": None}, {"a": None}
    step.load(first)
    step.load(second)
    first["a"][0]["b"][:] = b"other"
    assert second["a"][0]["b"] == bytearray(b"x")


def test_tensors_in_containers():
    """Tensors anywhere in dicts, lists and tuples; one that is there is filled in place, others are new."""
    w = torch.zeros(3)
    state = {"a": {"w": w, "n": 1}, "history": [], "pair": None}
    step = save(
        {
            "a": {"w": torch.arange(3.0), "n": 5},
            "history": [torch.ones(2), torch.zeros(1)],
            "pair": (torch.ones(1), {"x": [torch.tensor(3)]}),
        }
    )
    step.load(state)
    assert state["a"]["w"] is w
    assert w.tolist() == [0, 1, 2]
    assert state["a"]["n"] == 5
    assert_same(state["history"], [torch.ones(2), torch.zeros(1)])
    assert_same(state["pair"], (torch.ones(1), {"x": [torch.tensor(3)]}))


def test_a_list_of_tensors_takes_the_saved_length():
    """Longer or shorter, the list comes back as it was saved, its first tensors in place."""
    for length in (0, 1, 4):
        kept = torch.zeros(1)
        state = {"losses": [kept, torch.zeros(1)]}
        save({"losses": [torch.full((1,), float(i)) for i in range(length)]}).load(state)
        assert_same(state["losses"], [torch.full((1,), float(i)) for i in range(length)])
        assert length == 0 or state["losses"][0] is kept


def test_keys_that_look_alike_stay_apart():
    """``{"a.b"}``, ``{"a": {"b"}}``, ``1``, ``"1"`` and ``True`` name different tensors."""
    tree = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "%": torch.tensor(3), "[0:1]": torch.tensor(4)}
    tree |= {"k": {1: torch.tensor(5), "1": torch.tensor(6), None: torch.tensor(7), (1, "x"): torch.tensor(8)}}
    assert_same(save(tree).read(), tree)
    names = [leaf.name for leaf in flatten(tree, rank=0, world=1).tensors]
    assert len(set(names)) == 8


def test_s10_all_misfits_in_one_error_and_nothing_changed():
    """Strict: every missing, unexpected and mismatched tensor is listed, and the target is untouched."""
    step = save({"s": {"a": torch.zeros(4, 3), "b": torch.ones(2), "c": torch.zeros(5), "t": torch.zeros(1)}, "x": 1})
    target = {"s": {"a": torch.full((4, 2), 9.0), "b": torch.zeros(2), "d": torch.zeros(1)}, "y": torch.zeros(1)}
    target["s"]["t"] = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(MismatchError) as caught:
        wanted(target, step.view(), rank=0, world=1)
    message = str(caught.value)
    for text in ("s.a: float32 (4, 3) in the step, float32 (4, 2) in the state", "s.d", "s.c", "y", "x", "float64"):
        assert text in message
    assert target["s"]["b"].tolist() == [0, 0]


def test_s10_not_strict_loads_the_rest():
    """strict=False fills what fits and reports what does not."""
    step = save({"s": {"a": torch.zeros(4, 3), "b": torch.ones(2), "c": torch.zeros(5)}, "x": 1})
    a, d = torch.full((4, 2), 9.0), torch.zeros(1)
    target = {"s": {"a": a, "b": torch.zeros(2), "d": d}, "y": 1}
    found = step.load(target, strict=False)
    assert target["s"]["b"].tolist() == [1, 1]
    assert target["s"]["a"] is a
    assert a.eq(9).all()
    assert target["s"]["d"] is d
    assert (found.missing, found.unexpected, found.ignored) == (["s.d", "y"], ["s.c"], ["x"])
    assert [m.name for m in found.mismatched] == ["s.a"]


def test_s10_same_number_of_elements_is_not_the_same_shape():
    """(2, 6) does not fit (3, 4)."""
    with pytest.raises(MismatchError, match=r"\(2, 6\)"):
        wanted({"a": torch.zeros(3, 4)}, save({"a": torch.zeros(2, 6)}).view(), rank=0, world=1)


def test_kinds_that_differ_are_mismatches():
    """A tensor to fill, and no tensor in the step: whoever holds the tensor would not be told."""
    target = {"a": torch.zeros(1), "b": np.zeros(1), "c": torch.nn.Linear(1, 1), "d": 1, "e": {"m": torch.zeros(1)}}
    stored = {"a": 1, "b": torch.zeros(1), "c": 2, "d": torch.nn.Linear(1, 1), "e": 4}
    found = save(stored).load(target, strict=False)
    assert [m.name for m in found.mismatched] == ["a", "b", "c", "d", "e"]


def test_cast_converts():
    """Another dtype is a mismatch, and converted when asked."""
    step = save({"w": torch.tensor([1.5, 2.5]), "n": np.array([1, 2])})
    state = {"w": torch.zeros(2, dtype=torch.bfloat16), "n": np.zeros(2, np.float32)}
    with pytest.raises(MismatchError, match="cast=True"):
        wanted(state, step.view(), rank=0, world=1)
    step.load(state, cast=True)
    assert_same(state, {"w": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "n": np.array([1, 2], np.float32)})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.arange(6.0)[::-2],
        np.zeros((0, 3), np.float32),
        np.array(2.5),
        np.array([True, False]),
        np.array([1, 2], dtype=">f4"),
        np.broadcast_to(np.float32(1), (3,)),
        np.arange(8, dtype=np.uint64)[1::2],
        np.array([1 + 2j], np.complex64),
        np.frombuffer(b"\x01\x02", np.uint8),
        np.zeros(3, [("a", "i1"), ("b", "f4")])["b"],
    ],
)
def test_arrays(array):
    """Arrays come back equal, in native byte order, whatever their strides; and into one that is there."""
    expected = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)
    step = save({"n": array})
    assert_same(step.read(), {"n": expected})
    state = {"n": np.ones_like(expected)}
    there = state["n"]
    step.load(state)
    assert_same(state, {"n": expected})
    assert state["n"] is there
    other = {"n": np.ones_like(array, subok=False).astype(array.dtype)}
    step.load(other)
    assert_same(other, {"n": expected})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array(["a"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (np.zeros(2, [("a", "i4")]), "dtype"),
        (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray"),
        (np.zeros(1, np.longdouble), "longdouble|float128"),
    ],
)
def test_arrays_that_are_more_than_numbers_are_refused(value, words):
    """By name, before anything is written."""
    with pytest.raises(UnsupportedValueError, match=rf"cfg\.x: .*({words})"):
        flatten({"cfg": {"x": value}}, rank=0, world=1)


def test_a_strided_array_is_filled_in_place():
    """Whatever shows the same memory sees the new values."""
    base = np.zeros((4, 6), np.float32)
    for view in (base[::2, ::-3], base.T[1:3]):
        base[:] = 0
        expected = np.arange(view.size, dtype=np.float32).reshape(view.shape)
        state = {"n": view}
        save({"n": expected}).load(state)
        assert state["n"] is view
        assert_same(np.ascontiguousarray(view), expected)
        assert base.sum() == expected.sum()


def test_live_tensors_are_seen_at_flatten():
    """Leaves are the caller's memory, so a copy taken at once holds the old values."""
    w, n = torch.ones(3), np.ones(2)
    step = save({"w": w, "n": n, "l": (lst := [1])})
    w.fill_(2)
    n[:] = 5
    lst.append(2)
    assert_same(step.read(), {"w": torch.ones(3), "n": np.ones(2), "l": [1]})


class Stateful:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_objects():
    """Anything with state_dict and load_state_dict gets its whole state back, tensors and arrays in it too."""
    saved = {"n": 1, "t": torch.arange(3), "deep": [{"x": np.arange(2), "y": (torch.zeros(0), None)}]}
    thing = Stateful({"t": torch.zeros(3, dtype=torch.int64)})
    state = {"thing": thing}
    save({"thing": Stateful(saved)}).load(state)
    assert state["thing"] is thing
    assert_same(thing.state, saved)


def test_an_object_that_refuses_is_named():
    """The object's own error is kept as the cause."""

    class Picky(Stateful):
        def load_state_dict(self, state):
            raise KeyError("other")

    target = {"a": {"picky": Picky({})}}
    with pytest.raises(BadInputError, match=r"a\.picky: .*Picky.* refused .*KeyError") as caught:
        save({"a": {"picky": Stateful({"x": 1})}}).load(target)
    assert isinstance(caught.value.__cause__, KeyError)


def test_objects_inside_an_objects_state_are_refused():
    """Nobody could put them back."""
    with pytest.raises(UnsupportedValueError, match=r"thing\.inner: .*Linear"):
        flatten({"thing": Stateful({"inner": torch.nn.Linear(1, 1)})}, rank=0, world=1)


def test_a_read_only_mapping():
    """Fine while all is filled in place; refused in words when a value must be put back."""
    w = torch.zeros(2)
    save({"w": torch.ones(2)}).load(MappingProxyType({"w": w}))
    assert w.tolist() == [1, 1]
    with pytest.raises(BadInputError, match=r"read-only mappingproxy.*'epoch'"):
        save({"epoch": 300}).load(MappingProxyType({"epoch": 0}))


@pytest.mark.parametrize("state", [[1], None, {1: 2}, torch.nn.Linear(1, 1)])
def test_a_state_is_a_mapping_of_text(state):
    """Anything else is refused in words."""
    with pytest.raises(BadInputError, match=r"^state"):
        flatten(state, rank=0, world=1)


def test_a_state_that_contains_itself():
    """A cycle is refused, not followed."""
    cycle: list[object] = [1]
    cycle.append(cycle)
    with pytest.raises(UnsupportedValueError, match=r"x.*contains itself"):
        flatten({"x": cycle}, rank=0, world=1)


def test_per_rank_values_at_the_same_world_size():
    """Each rank gets its own; a plain value goes into the declaration, an object is filled in place."""

    def state(number):
        return {
            "seen": ckpt.per_rank({"n": number, "t": torch.tensor([number])}),
            "thing": ckpt.per_rank(Stateful({"x": number})),
            "model": torch.nn.Linear(1, 1),
            "w": ckpt.per_rank(torch.full((number + 1,), float(number))),
        }

    step = Step(*(part_of(state(rank), rank, 3) for rank in range(3)))
    for rank in range(3):
        target = state(99)
        target["w"] = ckpt.per_rank(torch.zeros(rank + 1))
        declared, thing, w = target["seen"], target["thing"].value, target["w"].value
        step.load(target, rank, 3)
        assert target["seen"] is declared
        assert_same(declared.value, {"n": rank, "t": torch.tensor([rank])})
        assert thing.state == {"x": rank}
        assert target["w"].value is w
        assert w.tolist() == [rank] * (rank + 1)
    plain = {"seen": None}
    step.load(plain, 1, 3)
    assert_same(plain["seen"], {"n": 1, "t": torch.tensor([1])})
    assert_same(step.read()["seen"], [{"n": r, "t": torch.tensor([r])} for r in range(3)])


def test_per_rank_values_at_another_world_size():
    """A list for an object that takes one, in rank order; refused by name for anything else."""

    class Many(Stateful):
        def load_state_dicts(self, states):
            self.state = states

    step = Step(*(part_of({"m": ckpt.per_rank(Many({"r": torch.tensor(r)}))}, r, 2) for r in range(2)))
    many = Many({})
    step.load({"m": ckpt.per_rank(many)}, 0, 3)
    assert_same(many.state, [{"r": torch.tensor(0)}, {"r": torch.tensor(1)}])
    with pytest.raises(BadInputError, match=r"m: each of 2 ranks saved its own, and this job has 3.*load_state_dicts"):
        step.load({"m": ckpt.per_rank(Stateful({}))}, 0, 3)


def test_a_module_and_its_optimizer_may_be_per_rank():
    """They are this rank's own, tensors and all."""

    def state(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"own": ckpt.per_rank({"model": model, "optimizer": optimizer})}

    saved = [state(0), state(1)]
    step = Step(*(part_of(saved[r], r, 2) for r in range(2)))
    target = state(2)
    step.load(target, 1, 2)
    assert_same(dict(target["own"].value["model"].state_dict()), dict(saved[1]["own"].value["model"].state_dict()))
    assert_same_optimizer(target["own"].value["optimizer"], saved[1]["own"].value["optimizer"])
