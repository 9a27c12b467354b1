"""S06: what is no tensor comes back, value and type, whatever the template holds."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt


def saved() -> dict[str, Any]:
    return {
        "epoch": 20,
        "lr": 1e-3,
        "text": "é",
        "none": None,
        "true": True,
        "bytes": b"\x00\xff",
        "tuple": (1, "a", None),
        "records": [{"k": 1}, {"k": 2}],
        "empty dict": {},
        "empty list": [],
        "default": defaultdict(list, x=[1]),
        "ordered": OrderedDict(b=1, a=2),
        "numpy": np.float64(0.1),
        "large": 2**70,
        "inf": math.inf,
        "nan": math.nan,
        "minus zero": -0.0,
        "whole float": 1.0,
        "one": 1,
        "deep": {"list": [(), [[]], {"t": (True, 1, 1.0)}], 3: "int key", "tensors": [torch.arange(3), torch.ones(2)]},
    }


def templates() -> dict[str, dict[str, Any]]:
    """Other numbers and lengths in the right types, nothing but nothing, and wrong types throughout."""
    return {
        "other numbers": {
            "epoch": 0,
            "lr": 0.0,
            "text": "",
            "none": None,
            "true": False,
            "bytes": b"",
            "tuple": (),
            "records": [],
            "empty dict": {},
            "empty list": [],
            "default": defaultdict(list),
            "ordered": OrderedDict(),
            "numpy": np.float64(0),
            "large": 0,
            "inf": 0.0,
            "nan": 0.0,
            "minus zero": 0.0,
            "whole float": 0.0,
            "one": 0,
            "deep": {"list": [], "tensors": []},
        },
        "longer": {key: value for key, value in saved().items() if not isinstance(value, (list, dict))}
        | {
            "records": [{"k": 7}, {"k": 8, "gone": 1}, {"k": 9}],
            "empty dict": {"a": 1},
            "empty list": [1, 2, 3],
            "default": defaultdict(int, x=[1, 2, 3], y=[5]),
            "ordered": OrderedDict(a=9, b=9, c=9),
            "deep": {
                "list": [1, 2, 3, 4],
                3: "",
                "tensors": [torch.zeros(3, dtype=torch.int64), *torch.zeros(4, 2)],
                "old": 1,
            },
        },
        "nothing": dict.fromkeys(saved()),
        "one is true": {key: 1 if value is True else True for key, value in saved().items()},
        "lists for tuples": {**dict.fromkeys(saved()), "tuple": [1, "a", None], "records": ({"k": 1}, {"k": 2})},
    }


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Equal, of the same type, and so all the way down; dict keys in the same order."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(map(repr, found)) == list(map(repr, expected)), where
        assert getattr(found, "default_factory", 0) is getattr(expected, "default_factory", 0), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert repr(found) == repr(expected), where  # nan is nan, and -0.0 is not 0.0
    else:
        assert found == expected, where


def assert_same_top(found: dict[str, Any]) -> None:
    """The whole state; the order of top-level keys is the caller's, and is not kept."""
    assert found.keys() == saved().keys()
    for key, value in saved().items():
        assert_same(found[key], value, f"state[{key!r}]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 of the state itself, step 2 of the state one level down."""
    path = tmp_path_factory.mktemp("s06") / "run"
    ckpt.save(path, 1, saved(), wait=True)
    ckpt.save(path, 2, {"inner": saved()}, wait=True)
    return path


@pytest.mark.parametrize("name", templates())
def test_s06_values_into_a_template(run: Path, name: str) -> None:
    """At the top level and nested, what the template held does not show."""
    target = templates()[name]
    ckpt.load(run, target, step=1)
    assert_same_top(target)
    nested = {"inner": templates()[name]}
    ckpt.load(run, nested, step=2)
    assert_same(nested["inner"], saved())


def test_s06_values_without_a_template(run: Path) -> None:
    """Read as they were saved."""
    assert_same_top(ckpt.read(run, step=1))
    assert_same(ckpt.read(run, step=2)["inner"], saved())


def test_s06_who_holds_the_container_sees_what_came(run: Path) -> None:
    """A list or dict of the saved type is filled in place, so that the loop's own variables have the values."""
    target = templates()["other numbers"]
    records, deep, default = target["records"], target["deep"], target["default"]
    ckpt.load(run, target, step=1)
    assert target["records"] is records
    assert target["deep"] is deep
    assert target["default"] is default
    assert_same([records, deep, default], [saved()["records"], saved()["deep"], saved()["default"]])
    default["new"].append(1)
    assert default["new"] == [1]


def test_s06_lists_that_grow_and_shrink_between_steps(tmp_path: Path) -> None:
    """One template follows a history of any length, forwards and back."""
    run = tmp_path / "run"
    history: list[Any] = []
    for step in range(1, 4):
        history.append({"step": step, "loss": torch.full((2,), float(step))})
        ckpt.save(run, step, {"history": history}, wait=True)
    target: dict[str, Any] = {"history": []}
    for step in (3, 1, 2):
        report = ckpt.load(run, target, step=step)
        assert report.missing == report.unexpected == report.mismatched == ()
        assert_same(target["history"], history[:step])
