"""Notes that ranks leave for each other in the job's own store, where a collective does not get through.

Nothing here waits for another rank: a key is there or it is not. Every call ends in a bounded time, whatever has
become of the process that keeps the store (which is a rank, where no launcher keeps it).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from ckpt.engine.aside import Aside, OverdueError

BOARD_TIMEOUT_S = 5.0

Result = TypeVar("Result")


class BoardError(Exception):
    """The job's store does not answer, or refuses."""


class Board:
    """The notes under one prefix. Slow, and never on the path of a collective that goes well."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._aside = Aside("ckpt-board")
        self._silent_until = 0.0

    def read(self, key: str) -> str:
        """What stands there; "" when nothing does."""
        return self._ask(lambda: self._look(key))

    def write(self, key: str, text: str) -> None:
        """Leave a note, in place of the one before."""
        self._ask(lambda: self._store.set(key, text))

    def decide(self, key: str, text: str) -> str:
        """Leave a note unless there is one; the one that counts: the first one, for everybody."""
        found: bytes = self._ask(lambda: self._store.compare_set(key, "", text))
        return found.decode()

    def count(self, key: str) -> int:
        """Add one; how many that makes."""
        count: int = self._ask(lambda: self._store.add(key, 1))
        return count

    def read_all(self, keys: list[str]) -> list[str]:
        """What stands under each of them."""
        limit_s = BOARD_TIMEOUT_S + len(keys) / 500
        return self._ask(lambda: [self._look(key) for key in keys], limit_s)

    def _look(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _ask(self, act: Callable[[], Result], limit_s: float = BOARD_TIMEOUT_S) -> Result:
        if time.monotonic() < self._silent_until:
            raise BoardError
        try:
            return self._aside.call(act, limit_s)
        except (OverdueError, RuntimeError) as error:  # torch's errors of a store are RuntimeErrors
            self._silent_until = time.monotonic() + BOARD_TIMEOUT_S
            raise BoardError(str(error)) from None
