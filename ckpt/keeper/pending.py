"""One save as the trainer sees it: how far the copy has come goes to the keeper, what became of it comes back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ckpt.errors import CkptError, KeeperError
from ckpt.format.commit import Attempt
from ckpt.keeper import protocol
from ckpt.keeper.protocol import SaveResult, SaveTask

LOOK_S = 1.0


class PendingTask:
    """A task that the keeper works on behind the copy: ``ready`` tells it how far that has come."""

    def __init__(
        self, task: SaveTask, announce: Callable[[int], None], owner_pid: int, look: Callable[[], None] = lambda: None
    ) -> None:
        """``look`` is called every second that someone waits: it ends what a keeper that does not answer has."""
        self.run = task.run
        self.step = task.step
        self.attempt = Attempt(task.step, task.writer, task.save)
        self.world = task.world
        self.arena = task.arena
        self.end = protocol.arena_end(task)
        self._announce = announce
        self._look = look
        self._owner_pid = owner_pid
        self._changed = threading.Condition()
        self._staged = False
        self._result: SaveResult | None = None
        self._error: CkptError | None = None
        self.at_fault = False  # whether it failed by this rank's own part

    def ready(self, nbytes: int) -> None:
        """The arena's first ``nbytes`` are final; never less than before. At ``end`` the arena is the keeper's.

        Cheap, but a message: once in some MiB is enough. Call it up to the end whatever becomes of the save, or
        abandon the attempt. A save that has failed meanwhile, or a keeper that is gone, is told by ``wait``.
        """
        check_process(self._owner_pid)
        self._announce(nbytes)

    @property
    def staged(self) -> bool:
        """Whether the keeper has acknowledged it: from then on the save does not need this process any more."""
        return self._staged

    @property
    def done(self) -> bool:
        """Whether the step is committed, or the save has failed."""
        return self._result is not None or self._error is not None

    @property
    def error(self) -> CkptError | None:
        """Why the save failed; None while it has not."""
        return self._error

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until it is staged. Raises what the keeper has against it, or TimeoutError."""
        self._wait(timeout_s, for_result=False)
        if not self._staged and self._error is not None:
            raise self._error

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """Wait until the step is committed. Raises what made the save fail, or TimeoutError."""
        self._wait(timeout_s, for_result=True)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _wait(self, timeout_s: float | None, *, for_result: bool) -> None:
        check_process(self._owner_pid)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            with self._changed:
                if self._changed.wait_for(lambda: self.done or (self._staged and not for_result), max(0.0, left_s)):
                    return
            if left_s < LOOK_S:
                what = "committed" if for_result else "staged"
                raise TimeoutError(f"step {self.step} is not {what} after {timeout_s:g} s")
            self._look()

    def _update(
        self, result: SaveResult | None = None, error: CkptError | None = None, *, at_fault: bool = False
    ) -> None:
        """It is staged, or it has ended."""
        with self._changed:
            self._staged = self._staged or error is None
            if not self.done:
                self.at_fault = at_fault
                self._result, self._error = result, error
            self._changed.notify_all()


def check_process(owner_pid: int) -> None:
    """KeeperError in a fork of the process that a connection belongs to."""
    if os.getpid() != owner_pid:
        raise KeeperError(f"this connection belongs to process {owner_pid}, of which this one is a fork; connect anew")
