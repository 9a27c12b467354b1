"""``ckpt.Checkpointer``: restore on entry, save when due, stop on SIGTERM, drain on exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec

from ckpt.engine import budget
from ckpt.engine.failures import FailedSave
from ckpt.engine.following import DRAIN_TIMEOUT_S
from ckpt.engine.load import LoadReport, load_with, say_repaired
from ckpt.engine.options import PROGRESS_TIMEOUT_S, SaveOptions, whole_number
from ckpt.engine.pending import PendingSave, SaveReport
from ckpt.engine.ranks import FlagInFlight
from ckpt.engine.session import session_of
from ckpt.errors import BadInputError, CkptError, NotFoundError, Preempted
from ckpt.format.metrics import is_metric_name
from ckpt.plan.retention import MAX, MIN, Best, KeepPolicy
from ckpt.state import RNG

RNG_KEY = "rng"


class Every(msgspec.Struct, frozen=True):
    """When a save is due; made by ``ckpt.every``."""

    steps: int

    def due(self, step: int) -> bool:
        """Whether step ``step`` is to be saved."""
        return step % self.steps == 0


def every(*, steps: int) -> Every:
    """Save at each multiple of ``steps`` (and, whatever it is, at the last step)."""
    return Every(whole_number(steps, "every: steps", least=1))


def keep(*, last: int | None = None, every: int | None = None, best: Best | None = None) -> KeepPolicy:
    """Keep the newest ``last`` steps, the multiples of ``every``, and the best by a metric (``ckpt.best``).

    ``last=None``, as in ``keep()`` or without a policy at all, deletes nothing, ever. ``last=1`` keeps the newest step
    alone. 0 and negative numbers mean neither "none" nor "all" here and are refused, and so are ``every`` and ``best``
    without ``last``: they only add to what stays.

    A step is deleted after a newer one is committed, never before, and only when one that stays and is newer has been
    read back whole from storage and verified; else nothing is deleted and a warning says so. What a reader holds stays
    until it has done. Raises BadInputError.
    """
    for name, value in (("last", last), ("every", every)):
        if value is not None:
            whole_number(value, f"keep: {name}", least=1)
    if best is not None and not isinstance(best, Best):
        raise BadInputError(f"keep: best={best!r}: expected ckpt.best(…)")
    if last is None and (every is not None or best is not None):
        raise BadInputError("keep(every=…) and keep(best=…) alone would delete nothing; give last= too")
    return KeepPolicy(last, every, best)


def best(metric: str, *, count: int = 1, mode: str = "min") -> Best:
    """For ``ckpt.keep(best=…)``: the ``count`` live steps whose ``metric`` is least, or with ``mode="max"`` greatest.

    Of equally good steps the newer counts. A step that was saved without the metric, or with NaN, is never among them.
    Raises BadInputError.
    """
    if not is_metric_name(metric):
        raise BadInputError(f"best: {metric!r:.100}: expected the name of a metric")
    if mode not in {MIN, MAX}:
        raise BadInputError(f"best: mode={mode!r}: expected {MIN!r} or {MAX!r}")
    return Best(metric, whole_number(count, "best: count", least=1), mode)


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
    the error of one that failed. With ``on_error="warn"`` a save that storage, a keeper or another rank failed does
    not end training: it is said, and stands in ``failed_saves``. Random states are saved under the key ``rng``.
    How saves are made (``encode``, ``overlap``, ``snapshots``, ``budget_bytes``, ``max_write_mbps``, ``parity``,
    ``alarms``) is as in ``ckpt.save``, ``tiers`` (where a damaged step's bytes may also be) as in ``ckpt.load``.
    ``metrics`` is a dict for the loop to fill, ``c.metrics["val_loss"] = loss``: rank 0's numbers are saved with the
    next step, for ``ckpt ls`` and ``ckpt.keep(best=…)``, and then it is emptied: each number is of one step.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        every: Every | None = None,
        keep: KeepPolicy | None = None,
        encode: str = "raw",
        overlap: bool = False,
        snapshots: int = 2,
        budget_bytes: int | None = None,
        max_write_mbps: float | None = None,
        parity: int = 0,
        on_error: str = "raise",
        alarms: str = "warn",
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        tiers: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        if RNG_KEY in state and not isinstance(state[RNG_KEY], RNG):
            raise BadInputError(f"state[{RNG_KEY!r}]: the Checkpointer keeps the random states there; rename yours")
        self._options = SaveOptions(
            encode=encode,
            overlap=overlap,
            snapshots=snapshots,
            budget_bytes=budget_bytes,
            max_write_mbps=max_write_mbps,
            parity=parity,
            on_error=on_error,
            alarms=alarms,
            keep=keep,
            progress_timeout_s=progress_timeout_s,
        )
        self.run = os.fspath(run)
        self.restored_step: int | None = None  # the step that entering restored
        self.load_report: LoadReport | None = None
        self.pending: PendingSave | None = None  # the newest save
        self.metrics: dict[str, Any] = {}  # name -> number, saved (rank 0's) with the next step, and then emptied
        self._state = state
        self._tiers = tiers
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
        self._failures_before = len(self._session.saves.failures.failed)
        full = self._full_state()
        try:
            # A run that was begun with ckpt.save has no random states.
            self.load_report = load_with(
                self._session,
                full,
                optional=(RNG_KEY,),
                tiers=self._tiers,
                progress_timeout_s=self._options.progress_timeout_s,
            )
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
        self._session.saves.say_where(self.run)
        if kind is None and self._stopped_at is not None:
            failed = None if self.pending is None else self.pending.error
            text = f"after saving step {self._stopped_at}"
            if failed is not None:
                text = f"at step {self._stopped_at}, which was not saved: {failed}"
            raise Preempted(f"stopped by SIGTERM {text}; start the job again to go on")

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
            self._session.saves.note_failures()
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
        self.pending = self._session.save(step, self._full_state(), self._options, self.metrics)
        self.metrics.clear()
        return self.pending

    @property
    def last_save(self) -> SaveReport | None:
        """What the newest save cost, once it is committed."""
        return self.pending.result() if self.pending is not None and self.pending.committed else None

    @property
    def failed_saves(self) -> list[FailedSave]:
        """Saves of this block that have failed so far, as this rank has heard; after ``drain`` all of them."""
        self._session.saves.note_failures()
        return self._session.saves.failures.failed[self._failures_before :]

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Wait until every save under way is committed; raises the error of one that failed, as ``on_error`` has it."""
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
            say_repaired(report.repaired)
            without = ", which has no random states: they stay as they are" if RNG_KEY in report.missing else ""
            print(f"ckpt: restored step {report.step} ({report.attempt}) of {self.run}{without}", file=sys.stderr)
