"""``ckpt.Checkpointer``: restore on entry, save when due, stop on SIGTERM, drain on exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec

from ckpt.engine import budget
from ckpt.engine.load import LoadReport, latest, load_with
from ckpt.engine.options import PROGRESS_TIMEOUT_S, SaveOptions, whole_number
from ckpt.engine.pending import PendingSave, SaveReport
from ckpt.engine.ranks import FlagInFlight
from ckpt.engine.session import DRAIN_TIMEOUT_S, session_of
from ckpt.errors import BadInputError, CkptError, NotFoundError, Preempted
from ckpt.state import RNG

RNG_KEY = "rng"


class Every(msgspec.Struct, frozen=True):
    """When a save is due; made by ``ckpt.every``."""

    steps: int

    def due(self, step: int) -> bool:
        """Whether step ``step`` is to be saved."""
        return step % self.steps == 0


class Keep(msgspec.Struct, frozen=True):
    """Which steps stay; made by ``ckpt.keep``."""

    last: int | None = None
    every: int | None = None


def every(*, steps: int) -> Every:
    """Save at each multiple of ``steps`` (and, whatever it is, at the last step)."""
    return Every(whole_number(steps, "every: steps", least=1))


def keep(*, last: int | None = None, every: int | None = None) -> Keep:
    """Keep the newest ``last`` steps and the multiples of ``every``; None, None keeps all.

    Older steps are deleted after a newer one is committed, never before, and never the newest.
    """
    for name, value in (("last", last), ("every", every)):
        if value is not None:
            whole_number(value, f"keep: {name}", least=1)
    if every is not None and last is None:
        raise BadInputError("keep(every=…) alone would delete nothing; give last= too")
    return Keep(last, every)


class _LateRNG(RNG):
    """Random states that are read with all else, but take effect only when the first step begins.

    What runs between (building iterators, warming up) may draw numbers without a trace.
    """

    def __init__(self) -> None:
        self._late: Any = None

    def load_state_dict(self, state_dict: Any) -> None:
        self._late = (super().load_state_dict, state_dict)

    def load_state_dicts(self, *arguments: Any, **keywords: Any) -> None:
        method = super().load_state_dicts
        self._late = (lambda _: method(*arguments, **keywords), None)

    def take_effect(self) -> None:
        if self._late is not None:
            act, state_dict = self._late
            self._late = None
            act(state_dict)


class Checkpointer:
    """A training loop's hold on a run; every rank makes one, with the same arguments.

    ::

        with ckpt.Checkpointer(run, {"model": model, "optimizer": optimizer}, every=ckpt.every(steps=100)) as c:
            for step in c.steps(total=10_000):
                train_step()

    Entering restores the newest step that verifies (all but the random states, which ``steps()``
    restores when the first step begins). Leaving waits until every save is committed and raises
    the error of one that failed. Random states are saved under the key ``rng``. How saves are made
    (``encode``, ``overlap``, ``snapshots``, ``budget_bytes``, ``max_write_mbps``, ``parity``) is as in ``ckpt.save``.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        every: Every | None = None,
        keep: Keep | None = None,
        encode: str = "raw",
        overlap: bool = False,
        snapshots: int = 2,
        budget_bytes: int | None = None,
        max_write_mbps: float | None = None,
        parity: int = 0,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
    ) -> None:
        if RNG_KEY in state and not isinstance(state[RNG_KEY], RNG):
            raise BadInputError(f"state[{RNG_KEY!r}]: the Checkpointer keeps the random states there; rename yours")
        kept = keep or Keep()
        self._options = SaveOptions(
            encode=encode,
            overlap=overlap,
            snapshots=snapshots,
            budget_bytes=budget_bytes,
            max_write_mbps=max_write_mbps,
            parity=parity,
            keep_last=kept.last,
            keep_every=kept.every,
            progress_timeout_s=progress_timeout_s,
        )
        self.run = os.fspath(run)
        self.restored_step: int | None = None  # the step that entering restored
        self.load_report: LoadReport | None = None
        self.pending: PendingSave | None = None  # the newest save
        self._state = state
        self._every = every
        self._rng = _LateRNG()
        self._stopping = threading.Event()
        self._stopped_at: int | None = None
        self._flag: FlagInFlight | None = None
        self._handler_before: Any = None
        self._step = 0
        self._warmed = False  # whether saves were prepared for

    # -- the with block --------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._session = session_of(self.run)
        full = self._full_state()
        try:
            # A run that was begun with ckpt.save has no random states.
            self.load_report = load_with(self._session, full, optional=(RNG_KEY,))
        except NotFoundError:  # a new run
            budget.foretell(self._session.ranks, full, self._options)
        else:
            self.restored_step = self._step = self.load_report.step
            self._state.update({key: full[key] for key in self._state})
            self._report_load(self.load_report)
            self._warm()
        if threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._flag is not None and kind is None:
                self._flag.result()
            if kind is None:
                self.drain()
            else:
                self._drain_after(error)
        finally:
            if self._handler_before is not None:
                signal.signal(signal.SIGTERM, self._handler_before)
        self._say_where()
        if kind is None and self._stopped_at is not None:
            raise Preempted(f"stopped by SIGTERM after saving step {self._stopped_at}; start the job again to go on")

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps that are left: 1 … total in a new run, N + 1 … total after restoring step N.

        The number is the count of steps done when the body ends, and what it is saved under. Saves
        when due, at the last step, and at the same step on all ranks after any of them got SIGTERM
        (then it ends). A step whose body was left by ``break`` or an exception is not saved.
        """
        self._rng.take_effect()
        for step in range(self._step + 1, total + 1):
            yield step
            self._step = step
            stop = self._agree_to_stop()
            if stop or step == total or (self._every is not None and self._every.due(step)):
                self.save(step)
            elif not self._warmed:
                self._warm()  # in a new run an optimizer has its state only now
            if stop:
                self._stopped_at = step
                return

    @property
    def stopping(self) -> bool:
        """True from the first SIGTERM on, for evaluation and data loops to look at (this rank's own view)."""
        return self._stopping.is_set()

    # -- saving ----------------------------------------------------------------------------

    def save(self, step: int) -> PendingSave:
        """Save now, as step ``step``; collective. ``steps()`` calls it when due."""
        self._warmed = True
        self.pending = self._session.save(step, self._full_state(), self._options)
        return self.pending

    @property
    def last_save(self) -> SaveReport | None:
        """What the newest save cost, once it is committed."""
        return self.pending.result() if self.pending is not None and self.pending.committed else None

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Wait until every save under way is committed; raises the error of one that failed."""
        self._session.drain(timeout_s)

    # -- inside ----------------------------------------------------------------------------

    def _warm(self) -> None:
        self._session.warm(self._full_state(), self._options)
        self._warmed = True

    def _full_state(self) -> dict[str, Any]:
        return {**self._state, RNG_KEY: self._rng}

    def _agree_to_stop(self) -> bool:
        """Whether any rank was told to stop, as of one step ago, so that all ranks see it at the same step."""
        if self._session.ranks.world == 1:
            return self.stopping
        agreed = self._flag is not None and self._flag.result()
        self._flag = None if agreed else self._session.ranks.start_flag(self.stopping)
        return agreed

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping.set()

    def _drain_after(self, error: BaseException | None) -> None:
        # The body's own error comes first; a failed save is said beside it, not instead of it.
        try:
            self.drain()
        except (CkptError, TimeoutError) as failed:
            if failed is not error:
                print(f"ckpt: {failed}", file=sys.stderr)

    def _report_load(self, report: LoadReport) -> None:
        if self._session.ranks.rank == 0:
            for skip in report.skipped:
                print(f"ckpt: passed over step {skip.step} ({skip.attempt}): {skip.why}", file=sys.stderr)
            without = ", which has no random states: they stay as they are" if RNG_KEY in report.missing else ""
            print(f"ckpt: restored step {report.step} ({report.attempt}) of {self.run}{without}", file=sys.stderr)

    def _say_where(self) -> None:
        if self._session.ranks.rank == 0:
            newest = latest(self.run)
            text = "no step is committed" if newest is None else f"the newest committed step is {newest}"
            print(f"ckpt: {text} in {self.run}", file=sys.stderr)
