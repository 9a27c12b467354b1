"""Stores that misbehave on purpose, and the battery that every store must pass; for other people's tests too.

``StoreTests`` is the battery: a new store is a class, plus a test class that names a fixture::

    class TestMyStore(ckpt.testing.StoreTests):
        @pytest.fixture
        def store(self, tmp_path): return MyStore(tmp_path)

The wrappers take any store. In another process (the keeper is one) they are put on by the environment variable
``CKPT_TEST_STORE``, see ``ckpt.testing.environment``; ``store_env`` writes it. Every path here is a test's own.

Two more modules see below the stores, to the system calls: ``ckpt.testing.kill_points`` lets a process die by SIGKILL
at any change to storage and any message between trainer and keeper, and ``ckpt.testing.power_cut`` makes of such a
record all that a crash of the machine could leave on the disk.

pytest is needed for ``StoreTests`` only, and imported with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckpt.testing.crashing import Crash, CrashStore
from ckpt.testing.environment import store_env, wrap
from ckpt.testing.faults import BlockingStore, FaultyStore, ShortStore, SlowStore
from ckpt.testing.recording import Operation, RecordingStore, read_log
from ckpt.testing.wrapped import MUTATING, READING, Tally, WrappedStore

if TYPE_CHECKING:
    from ckpt.testing.store_tests import StoreTests

__all__ = [
    "MUTATING",
    "READING",
    "BlockingStore",
    "Crash",
    "CrashStore",
    "FaultyStore",
    "Operation",
    "RecordingStore",
    "ShortStore",
    "SlowStore",
    "StoreTests",
    "Tally",
    "WrappedStore",
    "read_log",
    "store_env",
    "wrap",
]

_BATTERY = "ckpt.testing.store_tests"


def __getattr__(name: str) -> object:
    if name != "StoreTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(_BATTERY)  # before its import: a failed assert then shows both sides
    return importlib.import_module(_BATTERY).StoreTests
