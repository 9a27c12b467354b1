"""A store that answers in time or raises is a store like any other; one that hangs keeps nobody, and comes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ckpt.engine.bounded import BoundedStore
from ckpt.errors import StoreError
from ckpt.store import LocalStore, Store
from ckpt.testing import BlockingStore, StoreTests

LIMIT_S = 0.2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store is."""
    return tmp_path / "run"


class TestBoundedStore(StoreTests):
    """All that a store must do."""

    @pytest.fixture
    def store(self, root: Path) -> Store:
        """Over a local one."""
        return BoundedStore(LocalStore(root), 60.0, lambda: None)


@pytest.mark.parametrize("operation", ["get", "list", "size", "create"])
def test_a_store_that_hangs(tmp_path: Path, operation: str) -> None:
    """StoreError after the limit, naming key and seconds; when the storage answers again, so does the store."""
    signs: list[int] = []
    inner = BlockingStore(LocalStore(tmp_path / "store"), release=tmp_path / "release", operation=operation)
    store = BoundedStore(inner, LIMIT_S, lambda: signs.append(1))
    if operation != "create":
        store.create("folder/key", b"value")
    signs.clear()
    arguments = {"list": ("folder",), "create": ("folder/key", b"value")}.get(operation, ("folder/key",))
    threads = threading.active_count()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(StoreError, match=rf"/folder.*: {operation} has not come to an end in {LIMIT_S:g} s"):
            getattr(store, operation)(*arguments)
        assert time.monotonic() - started < 20 * LIMIT_S
    assert not signs
    (tmp_path / "release").touch()
    store.limit_s = 60.0
    while threading.active_count() > threads:  # what was left behind ends by itself
        time.sleep(0.005)
    assert store.get("folder/key") == b"value"
    assert signs
