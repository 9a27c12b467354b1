"""Kill points: the process dies at the k-th operation that changes the store."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar
from urllib.parse import quote

from ckpt.errors import BadInputError, StoreError
from ckpt.store.base import Sink, Store
from ckpt.testing.recording import append_line
from ckpt.testing.wrapped import Tally, WrappedStore

T = TypeVar("T")


class Crash(BaseException):
    """What ``how="raise"`` raises in place of dying; no ``except Exception`` of the code under test stops it."""


class CrashStore(WrappedStore):
    """Dies before (``after=True``: right after) matching operation number ``at``, counted from 0.

    By default the operations that change something are counted, over all stores that the process opens with the
    same environment; a ``delete_folder`` counts as one delete per object, then itself. For a sweep over all kill
    points, run once with ``at=None`` and a ``log``, which gets a line ``number op key nbytes`` before each operation;
    its number of lines is the number of points.

    ``how="kill"`` is SIGKILL to the own process. ``how="raise"`` raises Crash, quick enough for a sweep
    within one process; from then on every operation raises it too and ``abort`` does nothing: what the dead leave
    behind stays there.
    """

    default_operation = "mutating"

    def __init__(
        self,
        inner: Store,
        *,
        at: int | None = None,
        after: bool = False,
        how: str = "kill",
        log: str | os.PathLike[str] | None = None,
        match: str = "*",
        operation: str | Iterable[str] | None = None,
        tally: Tally | None = None,
    ) -> None:
        super().__init__(inner, match=match, operation=operation, tally=tally)
        if how not in {"kill", "raise"}:
            raise BadInputError(f"unknown how {how!r}; expected 'kill' or 'raise'")
        self._at, self._after, self._how, self._log = at, after, how, log

    def pass_on(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:
        """As the base has it, but the dead do nothing."""
        if self.tally.crashed:
            raise Crash(f"{operation} {key}: after the crash")
        return super().pass_on(operation, key, nbytes, call)

    def around(self, operation: str, key: str, nbytes: int, call: Callable[[], T]) -> T:
        """Counts, and dies when it is time."""
        with self.tally.lock:
            number = self.tally.operations
            self.tally.operations += 1
            if self._log is not None:
                append_line(self._log, f"{number} {operation} {quote(key, errors='surrogatepass')} {nbytes}\n")
        if number == self._at and not self._after:
            self._die(operation, key)
        result = call()
        if number == self._at:
            self._die(operation, key)
        return result

    def abort(self, sink: Sink, key: str, nbytes: int) -> None:
        """The sink's own, but the dead do not clean up."""
        if not self.tally.crashed:
            super().abort(sink, key, nbytes)

    def delete_folder(self, prefix: str) -> None:
        """One object after the other, so that a crash can come between any two."""
        for key in self._objects(prefix):
            self.delete(key)
        super().delete_folder(prefix)

    def _objects(self, prefix: str) -> Iterator[str]:
        for name in self.inner.list(prefix):
            key = f"{prefix}/{name}"
            try:
                is_object = self.inner.exists(key)
            except StoreError:  # a link or the like, which delete_folder itself removes
                continue
            if is_object:
                yield key
            else:
                yield from self._objects(key)

    def _die(self, operation: str, key: str) -> NoReturn:
        self.tally.crashed = True
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # the signal is on its way; not one more instruction of the test's code
        raise Crash(f"{'after' if self._after else 'before'} {operation} {key}")
