"""Retention: what a policy lets go is deleted after COMMIT, once a newer step that stays has been read back whole.

It has a thread of its own, for a step is read back as fast as the storage gives it, and no COMMIT waits for that. When
saves come quicker than that, several are followed by one retention, by the newest one's policy; where it takes long (a
large step is read by this one node), trainers are told of their step before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from ckpt.errors import CkptError
from ckpt.format.commit import Attempt
from ckpt.keeper import log
from ckpt.keeper.pace import Pace
from ckpt.keeper.requests import Requests
from ckpt.keeper.saves import Save
from ckpt.plan.retention import KeepPolicy, to_delete, vouchers
from ckpt.reading.verify import verify_attempt
from ckpt.run import Run, StepState, Survey

SWEEP_AFTER_S = 3600.0  # how long an older writer's attempt must have been seen without COMMIT before it is removed
PATIENCE_S = 10.0  # how long a save that is a step waits for its retention before it is told so
_LOOK_AGAIN_S = 0.5

NOTHING = "retention: nothing was deleted"


Post = Callable[[Save, tuple[str, ...], float], None]  # of a save: what went wrong, and when it was settled


class Due(msgspec.Struct, frozen=True):
    """A policy to apply after a COMMIT."""

    attempt: Attempt
    policy: KeepPolicy
    mbps: float | None  # 10^6 bytes a second that are read back at most
    timeout_s: float  # of one request


class Retention:
    """One run's, in this keeper: applies the policies of the saves whose COMMIT this keeper has written.

    ``post`` is called with each of them when that is done, or when it takes long: what goes wrong from then on stands
    in the log alone, and a keeper whose job has ended does not wait for it.
    """

    def __init__(self, url: str, open_run: Callable[[], Run], requests: Requests, post: Post) -> None:
        self.url = url
        self._open = open_run
        self._requests = requests
        self._post = post
        self._settled: queue.SimpleQueue[tuple[Save, tuple[str, ...], float] | None] = queue.SimpleQueue()
        self._unposted: list[tuple[Save, tuple[str, ...], float]] = []
        self._due: Due | None = None  # of the newest save that was taken
        self._started = self._ends = False
        self._hanging: threading.Thread | None = None  # one whose request has not returned in time
        self._known = Known()

    def takes(self, save: Save, warnings: tuple[str, ...], at: float) -> bool:
        """Whether a policy is to be applied now that a save is settled, after which it is posted.

        Called by one thread, with what is to be posted.
        """
        if due_after(save) is None:
            return False
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="retain", daemon=True).start()
        self._settled.put((save, warnings, at))
        return True

    def stop(self) -> None:
        """End the thread when what it does is done."""
        self._settled.put(None)

    def _run(self) -> None:
        while not self._ends:
            self._take(self._settled.get())
            self._take_all()
            while self._due is not None:
                due, self._due = self._due, None
                warnings: list[str] = []
                self._apply_watched(due, warnings)
                for warning in warnings:
                    log.problem(f"{self.url}: {warning}")
                self._post_all(warnings)

    def _take_all(self) -> None:
        while not self._settled.empty():
            self._take(self._settled.get())

    def _take(self, settled: tuple[Save, tuple[str, ...], float] | None) -> None:
        if settled is None:
            self._ends = True
        else:
            self._unposted.append(settled)
            self._due = due_after(settled[0])

    def _post_all(self, warnings: Sequence[str] = ()) -> None:
        for save, before, at in self._unposted:
            self._post(save, (*before, *warnings), at)
        self._unposted.clear()

    def _apply_watched(self, due: Due, warnings: list[str]) -> None:
        """Have a thread do it, and leave it behind when a single request of it takes too long."""
        if self._hanging is not None and self._hanging.is_alive():
            warnings.append(f"{NOTHING}, a request of an earlier one has not returned yet")
            return
        told: list[str] = []
        thread = threading.Thread(target=self._apply, args=(due, told), name="retaining", daemon=True)
        thread.start()
        started = time.monotonic()
        while thread.is_alive():
            thread.join(min(_LOOK_AGAIN_S, due.timeout_s / 4))
            if thread.is_alive() and time.monotonic() - started > PATIENCE_S:
                self._take_all()
                self._post_all()
            request = self._requests.of(thread)
            if request is not None and request.age_s > due.timeout_s and thread.is_alive():
                self._hanging = thread
                warnings.append(f"retention: {request}; nothing is deleted until it does")
                return
        warnings += told

    def _apply(self, due: Due, warnings: list[str]) -> None:
        try:
            self._known.retain(self._open(), due.attempt, due.policy, warnings, mbps=due.mbps)
        except CkptError as error:
            warnings.append(f"{NOTHING} further: {error}")
        except BaseException as error:  # noqa: BLE001 - the step is there; what went wrong here is told beside it
            log.unexpected(f"{self.url}: retention after {due.attempt.folder}")
            warnings.append(f"{NOTHING} further: unexpected {type(error).__name__} in the keeper: {error}")


def due_after(save: Save) -> Due | None:
    """What is to be applied now that a save is over: the policy of one whose COMMIT was written here."""
    if save.failure is not None or not save.coordinating:
        return None
    task = save.works[0].task
    if task.keep is None or task.keep.last is None:
        return None
    return Due(save.attempt, task.keep, task.max_write_mbps, save.progress_timeout_s)


class Known:
    """What is known of a run's attempts from one retention to the next: each is read back once."""

    def __init__(self) -> None:
        self.whole: dict[Attempt, bool] = {}  # whether it verified when it was read back
        self._metrics: dict[Attempt, dict[str, float]] = {}  # they never change
        self._leftovers: set[Attempt] = set()  # whose COMMIT was deleted here, and whose files a reader still held
        self._incomplete_since: dict[Attempt, float] = {}  # older writers' attempts without COMMIT; time.monotonic()
        self._pace = Pace()  # reading back has its own: no save pays for it

    def retain(
        self, run: Run, attempt: Attempt, policy: KeepPolicy, warnings: list[str], *, mbps: float | None = None
    ) -> None:
        """Delete what the policy lets go, now that ``attempt`` is committed; read back at most ``mbps`` 10^6 bytes/s.

        Raises CkptError where the run cannot be looked at; what else goes wrong is told in ``warnings``.
        """
        survey = run.survey()
        self._forget(survey)
        held = run.held()
        metrics = self._read_metrics(run, survey, policy, warnings)
        # Its own retention never deletes it: other nodes may not have seen its COMMIT yet.
        going = to_delete(survey.states, policy, metrics, {*held, attempt})
        if going and self._some_voucher_is_whole(run, survey, going, mbps, warnings):
            run.make_durable(state.attempt for state in survey.live if state.attempt not in going)
            held = run.held()  # reading back takes its time
            for old in going:
                if old not in held:
                    self._delete(run, old, warnings)
        self._sweep(run, survey, attempt, held, warnings)

    def _forget(self, survey: Survey) -> None:
        there = {state.attempt for state in survey.steps}
        for known in (self.whole, self._metrics, self._incomplete_since):
            for attempt in [attempt for attempt in known if attempt not in there]:
                del known[attempt]
        self._leftovers &= there

    def _read_metrics(
        self, run: Run, survey: Survey, policy: KeepPolicy, warnings: list[str]
    ) -> dict[Attempt, dict[str, float]]:
        if policy.best is None:
            return {}
        for state in survey.live:
            if state.attempt not in self._metrics and state.commit is not None:
                try:
                    self._metrics[state.attempt] = run.metrics(state.attempt, state.commit)
                except CkptError as error:
                    warnings.append(f"retention: the metrics of step {state.attempt.step} count for nothing: {error}")
                    self._metrics[state.attempt] = {}
        return self._metrics

    def _some_voucher_is_whole(
        self, run: Run, survey: Survey, going: Sequence[Attempt], mbps: float | None, warnings: list[str]
    ) -> bool:
        """Whether a step that stays, and is newer than all that go, was read back whole; reads until one is."""
        candidates = vouchers(survey.states, going)
        if any(self.whole.get(attempt) for attempt in candidates):
            return True
        states = {state.attempt: state for state in survey.live}
        for attempt in candidates:
            if attempt in self.whole:  # and not whole: it was said then
                continue
            problem = self._read_back(run, states[attempt], mbps)
            self.whole[attempt] = problem is None
            if problem is None:
                return True
            warnings.append(f"retention: step {attempt.step} ({attempt.label}) does not verify: {problem}")
        steps = ", ".join(str(attempt.step) for attempt in candidates) or "none"
        warnings.append(f"{NOTHING}: of the steps that would stay ({steps}) none verifies")
        return False

    def _read_back(self, run: Run, state: StepState, mbps: float | None) -> str | None:
        """What is wrong with a step, every byte of which is read from storage; None: nothing."""
        done = 0

        def rest(nbytes: int, _total: int) -> None:
            nonlocal done
            while mbps is not None and (wait_s := self._pace.wait_s(nbytes - done, mbps)):
                time.sleep(wait_s)
            done = nbytes

        started = time.monotonic()
        report = verify_attempt(Run(run.store), state, rest)  # one that has read nothing yet
        seconds = time.monotonic() - started
        log.say(
            f"{run.url}: {state.attempt.folder}: read back {report.bytes_read:,} bytes in {seconds:.3f} s: "
            f"{'whole' if report.ok else f'{len(report.problems)} problems'}"
        )
        return None if report.ok else str(report.problems[0])

    def _delete(self, run: Run, attempt: Attempt, warnings: list[str]) -> None:
        try:
            hold = run.delete_attempt(attempt)
        except CkptError as error:
            warnings.append(f"retention: step {attempt.step} ({attempt.label}) was not deleted: {error}")
            return
        if hold is not None:
            self._leftovers.add(attempt)

    def _sweep(
        self, run: Run, survey: Survey, committed: Attempt, held: Collection[Attempt], warnings: list[str]
    ) -> None:
        """Remove attempts without COMMIT that can become no step any more.

        Those whose COMMIT was deleted here are left of readers who are done by now. An older writer's may be under way
        until it has been told that it is fenced. What this writer left behind it removes itself, as far as it can.
        """
        now = time.monotonic()
        for state in survey.steps:
            attempt = state.attempt
            if state.state != "incomplete" or attempt in held:
                continue
            if attempt not in self._leftovers:
                if attempt.writer >= committed.writer:
                    continue
                if now - self._incomplete_since.setdefault(attempt, now) < SWEEP_AFTER_S:
                    continue
            try:
                run.delete_attempt(attempt)
            except CkptError as error:
                warnings.append(f"retention: what is left of {attempt.folder} was not removed: {error}")
