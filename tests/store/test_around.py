"""Stores around other stores pass every operation on: one that they forgot would quietly be the interface's default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.engine.bounded import BoundedStore
from ckpt.keeper.requests import Requests, WatchedStore
from ckpt.store import LocalStore, Store
from ckpt.testing import WrappedStore

AROUND: dict[str, Callable[[Store], Store]] = {
    "bounded": lambda inner: BoundedStore(inner, 30, lambda: None),
    "watched": lambda inner: WatchedStore(inner, Requests()),
    "wrapped": WrappedStore,
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "read_into": ("a/key", 0, memoryview(bytearray(1))),
    "create": ("a/new", b"x"),
    "open_sink": ("a/sink",),
    "list": ("a",),
    "delete_folder": ("a",),
}
OPERATIONS = [
    name for name, found in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")
]  # of the interface as it is: a new one is tested, too


class Noting(LocalStore):
    """Notes which of its methods are called from outside."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            self.called.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("around", AROUND)
def test_every_operation_is_passed_on(tmp_path: Path, around: str, operation: str) -> None:
    """By its own name; only what changes nothing but how it is asked may come as another."""
    inner = Noting(str(tmp_path))
    inner.create("a/key", b"x")
    inner.called.clear()
    result = getattr(AROUND[around](inner), operation)(*ARGUMENTS.get(operation, ("a/key",)))
    if hasattr(result, "close"):
        result.close()
    same = {"exists": "size", "read_into": "open_source"}.get(operation)  # how the interface itself has them
    assert inner.called[0] in {operation, same}
