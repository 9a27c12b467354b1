"""Prune: removes what is in nobody's use any more, and never the last step that verifies, nor one that a reader holds.

A store has no times of its own, so the age of an attempt without COMMIT is told by records alone.
It is over when something newer proves that it can no longer become a step:

* a newer writer exists: its own writer is fenced. The clock starts with the newer record, since
  staged saves of the older writer are given a bounded chance to commit after it.
* its own writer has committed a later save: saves of a writer commit in order. The clock starts
  with that COMMIT.

Without either it may be under way this very moment, however old its writer is, and stays. Once
over for ``grace_s`` it is removed. That time is the clock's: one that jumps ahead shortens it, one that
jumps back lengthens it, and neither makes a step of what is over, or the reverse.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

import msgspec

from ckpt import holds
from ckpt.errors import AlreadyExistsError, BadInputError, CkptError, NotFoundError, StoreError
from ckpt.format.commit import Attempt
from ckpt.format.hold import Hold
from ckpt.format.layout import LAYOUTS, layout_key
from ckpt.plan.live import ABANDONED, LIVE, SUPERSEDED
from ckpt.plan.retention import Best, KeepPolicy, to_delete
from ckpt.reading.verify import verify_attempt
from ckpt.run import LAYOUT_LIMIT_NBYTES, Run, StepState, Survey

GRACE_S = 3600.0


class Removed(msgspec.Struct, frozen=True):
    """An attempt that was (or would be) removed."""

    folder: str
    step: int
    attempt: str
    state: str
    why: str
    nbytes: int


class Kept(msgspec.Struct, frozen=True):
    """Something that looks removable and was left, and why."""

    what: str
    why: str


class PruneReport(msgspec.Struct, frozen=True):
    """What prune did, or with ``dry_run`` would do."""

    run: str
    dry_run: bool
    removed: tuple[Removed, ...]
    removed_layouts: tuple[str, ...]
    removed_holds: tuple[str, ...]  # keys of holds that were void
    kept: tuple[Kept, ...]
    verified_step: int | None  # read whole before older live steps were removed

    @property
    def removed_nbytes(self) -> int:
        """Bytes of all removed attempts."""
        return sum(removed.nbytes for removed in self.removed)


def prune(
    run: str | os.PathLike[str] | Run,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: Best | None = None,
    not_live: bool = False,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    now_unix_s: float | None = None,
) -> PruneReport:
    """Remove orphan attempts that are over for ``grace_s``, layouts that nothing needs, and holds that are void.

    ``keep_last=K`` also removes live steps before the newest K, but for the multiples of ``keep_every`` and the best
    by ``keep_best``, and all superseded and abandoned ones;
    before that a step that stays is verified, byte by byte, and if none of them is whole the
    newest older one that is stays too. ``not_live`` removes superseded, abandoned and damaged
    attempts without touching live steps. COMMIT goes first, so a reader never meets half a step, and what a reader
    holds stays.

    Raises BadInputError for ``keep_last`` or ``keep_every`` below 1 and for a run that is none, StoreError.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise BadInputError(f"{name}={value}: at least one live step stays; give 1 or more")
    if keep_last is None and (keep_every is not None or keep_best is not None):
        raise BadInputError("keep_every and keep_best alone would remove nothing; give keep_last too")
    if not grace_s >= 0:  # nan too
        raise BadInputError(f"grace_s={grace_s}: give 0 or more seconds")
    opened = run if isinstance(run, Run) else Run.open(run)
    opened.require()
    now = time.time() if now_unix_s is None else now_unix_s
    survey = opened.survey()
    held, void = holds.look(opened.store, now)
    chosen, kept = _orphans(survey, grace_s, now)
    going = {state.attempt for state in chosen}
    verified = None
    if keep_last is not None or not_live:
        unwanted = {SUPERSEDED, ABANDONED} | ({"damaged"} if not_live else set())
        going |= {state.attempt for state in survey.steps if state.state in unwanted}
    if keep_last is not None:
        policy = KeepPolicy(keep_last, keep_every, keep_best)
        gone = to_delete(survey.states, policy, _metrics(opened, survey, policy, kept))
        old = {a for a in gone if survey.states[a][0] == LIVE}
        if old <= set(held):  # so none of them goes
            going |= old
        else:
            verified = _newest_whole(opened, survey, kept, old)
            going |= old - {verified} if verified is not None else set()
    removed, staying = _remove(opened, survey, going, held, kept, dry_run=dry_run)
    void = [key for key in void if dry_run or _delete_hold(opened, key, kept)]
    layouts = _prune_layouts(opened, survey, staying, kept, grace_s, now, dry_run=dry_run)
    return PruneReport(
        run=opened.url,
        dry_run=dry_run,
        removed=tuple(removed),
        removed_layouts=tuple(layouts),
        removed_holds=tuple(void),
        kept=tuple(kept),
        verified_step=None if verified is None else verified.step,
    )


def _delete_hold(run: Run, key: str, kept: list[Kept]) -> bool:
    try:
        run.store.delete(key)
    except StoreError as error:  # another user's, perhaps; it keeps nothing
        kept.append(Kept(key, f"void, but it cannot be removed: {error}"))
        return False
    return True


def _metrics(run: Run, survey: Survey, policy: KeepPolicy, kept: list[Kept]) -> dict[Attempt, dict[str, float]]:
    """What was saved with the live steps, as far as the policy asks for it."""
    found: dict[Attempt, dict[str, float]] = {}
    for state in survey.live if policy.best is not None else ():
        assert state.commit is not None
        try:
            found[state.attempt] = run.metrics(state.attempt, state.commit)
        except CkptError as error:  # it may have been the best: nobody can tell
            kept.append(Kept(state.attempt.folder, f"its metrics count for nothing: {error}"))
    return found


def _remove(
    run: Run, survey: Survey, going: set[Attempt], held: Mapping[Attempt, Hold], kept: list[Kept], *, dry_run: bool
) -> tuple[list[Removed], list[StepState]]:
    """(what went, what is still there): what a reader holds is left, and what one has just come for is left in part."""
    removed: list[Removed] = []
    staying: list[StepState] = []
    if going and not dry_run:
        run.make_durable(s.attempt for s in survey.steps if s.commit is not None and s.attempt not in going)
    for state in survey.steps:
        hold = held.get(state.attempt)
        if state.attempt not in going:
            staying.append(state)
        elif hold is not None:
            staying.append(state)
            kept.append(Kept(state.attempt.folder, holds.describe(hold)))
        else:
            removed.append(_removed(run, state))
            hold = None if dry_run else run.delete_attempt(state.attempt)
            if hold is not None:
                staying.append(msgspec.structs.replace(state, commit=None))
                kept.append(Kept(state.attempt.folder, f"its files, for a later prune: {holds.describe(hold)}"))
    return removed, staying


def over_since(attempt: Attempt, survey: Survey) -> float | None:
    """Since when (unix seconds) an attempt without COMMIT can be no step any more; None: it may become one."""
    newer = [writer.created_unix_s for writer in survey.writers if writer.number > attempt.writer]
    newer += [
        state.commit.created_unix_s
        for state in survey.steps
        if state.commit is not None and state.attempt.writer == attempt.writer and state.attempt.save > attempt.save
    ]
    return min(newer, default=None)


def _orphans(survey: Survey, grace_s: float, now: float) -> tuple[list[StepState], list[Kept]]:
    going: list[StepState] = []
    kept: list[Kept] = []
    for state in survey.steps:
        if state.state != "incomplete":
            continue
        since = over_since(state.attempt, survey)
        if since is None:
            kept.append(Kept(state.attempt.folder, "no COMMIT yet, but its writer is the newest: it may be under way"))
        elif now - since < grace_s:
            left = grace_s - (now - since)
            kept.append(
                Kept(state.attempt.folder, f"without COMMIT, removable in {left:.0f} s (grace {grace_s:.0f} s)")
            )
        else:
            going.append(state)
    return going, kept


def _newest_whole(run: Run, survey: Survey, kept: list[Kept], old: set[Attempt]) -> Attempt | None:
    """The newest live attempt whose every byte verifies: one of those that stay, or else an ``old`` one."""
    for state in reversed(survey.live):
        report = verify_attempt(run, state)
        if report.ok:
            if state.attempt in old:
                kept.append(Kept(state.attempt.folder, "the newest step that verifies"))
            return state.attempt
        kept.append(Kept(state.attempt.folder, f"does not verify: {report.problems[0]}"))
    kept.append(Kept("every live step", "none of them verifies, so none is removed"))
    return None


def _removed(run: Run, state: StepState) -> Removed:
    nbytes = 0
    for name in run.store.list(state.attempt.folder):
        try:
            nbytes += run.store.size(run.key(state.attempt, name))
        except NotFoundError:  # a folder, or just removed by someone else
            continue
    why = state.why or "older than the steps to keep"
    return Removed(state.attempt.folder, state.attempt.step, state.attempt.label, state.state, why, nbytes)


def _prune_layouts(
    run: Run,
    survey: Survey,
    staying: Sequence[StepState],
    kept: list[Kept],
    grace_s: float,
    now: float,
    *,
    dry_run: bool,
) -> list[str]:
    """Remove layouts that no step needs, when nothing can be about to need them."""
    needed = {ref.digest for state in staying if state.commit is not None for ref in state.commit.layouts}
    stored = [name.removesuffix(".json") for name in run.store.list(LAYOUTS) if name.endswith(".json")]
    unneeded = [digest for digest in stored if digest not in needed]
    if not unneeded:
        return []
    newest = max(
        [writer.created_unix_s for writer in survey.writers]
        + [state.commit.created_unix_s for state in survey.steps if state.commit is not None]
    )
    why = None
    if any(state.commit is None for state in staying):
        why = "an attempt without a readable COMMIT may need it"
    elif now - newest < grace_s:
        why = "the run was written to within the grace period, and the next save may need it"
    if why is not None:
        kept.extend(Kept(layout_key(digest), why) for digest in unneeded)
        return []
    if dry_run:
        return unneeded
    gone = []
    for digest in unneeded:
        raw = run.store.get(layout_key(digest), limit_nbytes=LAYOUT_LIMIT_NBYTES)
        run.store.delete(layout_key(digest))
        # A save that found the layout there just before, and commits just now, gets it back.
        if any(ref.digest == digest for state in run.survey().steps if state.commit for ref in state.commit.layouts):
            with contextlib.suppress(AlreadyExistsError):
                run.store.create(layout_key(digest), raw)
            kept.append(Kept(layout_key(digest), "a save has just taken it up"))
        else:
            gone.append(digest)
    return gone
