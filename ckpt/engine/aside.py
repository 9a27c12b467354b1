"""Calls that may never return, made in a thread that can be left behind. Collectives are not among them, ever."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class OverdueError(Exception):
    """A call has not returned in its time; nobody waits for it any more."""


class _Errand:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self.outcome: Any = None
        self.error: BaseException | None = None
        self._act = act

    def run(self) -> None:
        try:
            self.outcome = self._act()
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            self.error = error
        self.done.set()


class Aside:
    """Makes one thread's calls in another one, which is replaced when a call does not return in time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: queue.SimpleQueue[_Errand | None] | None = None
        self._owner_pid = 0

    def call(self, act: Callable[[], Result], limit_s: float) -> Result:
        """``act()``, or what it raises. OverdueError when it takes longer; it may then still go on, and end, later."""
        if self._errands is None or self._owner_pid != os.getpid():  # a fork has no such thread
            self._start()
        assert self._errands is not None
        errand = _Errand(act)
        self._errands.put(errand)
        if not errand.done.wait(limit_s):
            self._errands.put(None)
            self._errands = None
            raise OverdueError
        if errand.error is not None:
            raise errand.error
        result: Result = errand.outcome
        return result

    def _start(self) -> None:
        errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(errands,), name=self._name, daemon=True).start()
        self._errands, self._owner_pid = errands, os.getpid()

    def __del__(self) -> None:
        """Let the thread end. No weakref.finalize: its list must not change in one thread while another one exits."""
        if self._errands is not None:
            self._errands.put(None)


def _serve(errands: queue.SimpleQueue[_Errand | None]) -> None:
    while (errand := errands.get()) is not None:
        errand.run()
