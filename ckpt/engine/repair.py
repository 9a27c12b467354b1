"""Repair: puts damaged or missing files of a step right on storage, from tiers or parity, or leaves them as they are.

Objects are never replaced in place. The right bytes are written whole and durable as ``repaired-<name>`` beside the
damaged object, then that is deleted, written anew under its name, and the copy deleted. Whenever this is cut short, the
step can be repaired from at least what it could be before: the copy is one more place that has the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ckpt.engine.mending import Mender, mend_writers
from ckpt.errors import BadInputError, CkptError, DamagedError, NotFoundError, StoreError, UnsupportedFormatError
from ckpt.format.commit import COMMIT, Attempt, Commit, decode_commit
from ckpt.holds import holding
from ckpt.reading.report import Problem, Progress, VerifyReport
from ckpt.reading.sources import COPIES_DEEP, Repaired, copy_key
from ckpt.reading.step import StepReader
from ckpt.reading.tiers import TieredRun, Url, tiered
from ckpt.reading.verifier import Verifier
from ckpt.run import COMMIT_LIMIT_NBYTES, Run


class StepRepair(msgspec.Struct, frozen=True):
    """What became of one step: files put right (or, in a dry run, that would be), and problems that are left."""

    step: int
    attempt: str
    repaired: tuple[Repaired, ...]
    left: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte of the step is right now (in a dry run: would be)."""
        return not self.left


class RepairReport(msgspec.Struct, frozen=True):
    """What repairing a run did, or with ``dry_run`` would do; ``writers``: records of writers that were put right."""

    run: str
    dry_run: bool
    writers: tuple[Repaired, ...]
    steps: tuple[StepRepair, ...]

    @property
    def ok(self) -> bool:
        """Whether every step that was looked at is whole."""
        return all(step.ok for step in self.steps)


def repair(
    run: str | os.PathLike[str] | Run,
    *,
    step: int | None = None,
    every_step: bool = False,
    sources: Sequence[Url] = (),
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Put right what is damaged or missing of a step: the latest, number ``step``, or with ``every_step`` of all.

    The right bytes come from what an interrupted repair left, from ``sources`` (roots with copies of the run's steps),
    from parity, or from what a file is made of; each is verified before anything is touched. A newer attempt whose
    COMMIT is torn is repaired with the latest step. COMMIT itself is put back last, when all else is whole.

    Raises NotFoundError for a step that is not there, DamagedError for a writer's record that nothing has right,
    BadInputError, StoreError.
    """
    if step is not None and every_step:
        raise BadInputError("repair: give a step or every_step, not both")
    plain = run if isinstance(run, Run) else Run.open(run)
    if not plain.attempts():  # else it is a run, even if its writers' records are lost
        plain.require()
    opened = tiered(plain, sources)
    writers = mend_writers(opened, dry_run=dry_run)
    if dry_run and writers:
        # Without them nobody can say which steps are live; what follows could only be guessed.
        return RepairReport(plain.url, dry_run, tuple(writers), ())
    reports = []
    for attempt, why in _chosen(opened, plain, step, every_step=every_step):
        with holding(plain.store, attempt):  # nobody deletes meanwhile what is being put right
            reports.append(_repair_attempt(opened, attempt, why, dry_run=dry_run, progress=progress))
    return RepairReport(plain.url, dry_run, tuple(writers), tuple(reports))


def _chosen(run: Run, plain: Run, step: int | None, *, every_step: bool) -> Iterator[tuple[Attempt, str]]:
    """The attempts to look at, and why the COMMIT of each cannot be read here; newest last."""
    here = set(plain.attempts())
    chosen: list[tuple[Attempt, str]] = []
    if every_step:
        yield from [
            (state.attempt, "" if state.commit is not None else state.why)
            for state in plain.survey().steps
            if state.state != "incomplete" or _has_commit_elsewhere(run, state.attempt)
        ]
        return
    found = False
    for state in run.live_steps():
        if (step is not None and state.attempt.step != step) or (step is None and state.attempt not in here):
            continue
        if state.state == "unsupported":  # not damage
            raise UnsupportedFormatError(state.why)
        whole = state.commit is not None or _has_commit_elsewhere(run, state.attempt)
        if whole or state.state != "incomplete":
            chosen.append((state.attempt, state.why))
        if whole:
            found = True
            break
    if not found and not chosen:
        chosen.append((run.find(step).attempt, ""))  # or it says which steps there are
    yield from reversed(chosen)


def _has_commit_elsewhere(run: Run, attempt: Attempt) -> bool:
    try:
        _commit_elsewhere(run, attempt, NotFoundError(""))
    except CkptError:
        return False
    return True


def _commit_elsewhere(run: Run, attempt: Attempt, error: CkptError) -> tuple[Commit, bytes, str]:
    """(COMMIT, its bytes, where from) when it is not right here. Raises ``error``, with what was tried."""
    key = run.key(attempt, COMMIT)
    for depth in range(1, COPIES_DEEP + 1):
        try:
            raw = run.store.get(copy_key(key, depth), limit_nbytes=COMMIT_LIMIT_NBYTES)
            commit = decode_commit(raw, f"{run.url}/{copy_key(key, depth)}")
        except CkptError:
            continue
        if (commit.step, commit.attempt) == (attempt.step, attempt.label):
            return commit, raw, copy_key(key, depth).rpartition("/")[2]
    if not isinstance(run, TieredRun):
        raise error
    commit = run.read_commit(attempt)  # from a tier, else it says what was tried
    tier = next(tier for tier in run.tiers if tier.url == run.commits_from.get(attempt))
    return commit, tier.store.get(key, limit_nbytes=COMMIT_LIMIT_NBYTES), tier.url


def _repair_attempt(run: Run, attempt: Attempt, why: str, *, dry_run: bool, progress: Progress | None) -> StepRepair:
    key = run.key(attempt, COMMIT)
    lost_commit: tuple[bytes, Repaired] | None = None
    try:
        commit = Run(run.store).read_commit(attempt)
    except (NotFoundError, DamagedError, StoreError) as error:
        try:
            commit, raw, source = _commit_elsewhere(run, attempt, error)
        except CkptError as nowhere:
            return StepRepair(attempt.step, attempt.label, (), (Problem(key, why or str(nowhere)),))
        lost_commit = raw, Repaired(key, source)
    except CkptError as error:
        return StepRepair(attempt.step, attempt.label, (), (Problem(key, str(error)),))
    done: list[Repaired] = []
    failed: dict[str, str] = {}
    while True:
        reader = StepReader(run, attempt, commit)
        report = Verifier(reader, progress).report()
        todo = [file for file in _repairable(report) if file not in failed]
        if dry_run:
            would = [Repaired(file, _sources_of(report, file)) for file in todo]
            left = tuple(problem for problem in report.problems if problem.file not in todo)
            if lost_commit is not None and not left:
                would.append(lost_commit[1])
            return StepRepair(attempt.step, attempt.label, tuple(would), left + _without(lost_commit, left))
        mender = Mender(reader, progress)
        mended = 0
        for file in _in_order(todo):
            try:
                source = mender.mend(file)
            except CkptError as error:
                failed[file] = str(error)
            else:
                mended += 1
                done.append(Repaired(file, source))
                failed[file] = "it was written, and what comes back is not that"  # where it is found damaged again
        if not mended:
            break
    left = tuple(_with_failure(problem, failed) for problem in report.problems)
    if not left:
        if lost_commit is not None:
            mender.put_small(key, lost_commit[0])
            done.append(lost_commit[1])
        mender.remove_copies()
    return StepRepair(attempt.step, attempt.label, tuple(done), left + _without(lost_commit, left))


def _without(lost_commit: tuple[bytes, Repaired] | None, left: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """A COMMIT that was lost is not put back over files that are not whole."""
    if lost_commit is None or not left:
        return ()
    what = "damaged or missing, and not put back while other files of the step are damaged"
    return (Problem(lost_commit[1].file, what, repair=lost_commit[1].source),)


def _repairable(report: VerifyReport) -> list[str]:
    """The files all of whose problems can be repaired."""
    lost = {problem.file for problem in report.problems if problem.repair is None}
    return list(dict.fromkeys(problem.file for problem in report.problems if problem.file not in lost))


def _sources_of(report: VerifyReport, file: str) -> str:
    named = [str(problem.repair) for problem in report.problems if problem.file == file]
    return ", ".join(dict.fromkeys(source for text in named for source in text.split(", ")))


def _in_order(files: Iterable[str]) -> list[str]:
    """What other files are understood by comes first, what is made of other files last."""
    return sorted(files, key=lambda file: (file.endswith(".xor"), not file.endswith(".json"), file))


def _with_failure(problem: Problem, failed: dict[str, str]) -> Problem:
    if problem.file not in failed:
        return problem
    return msgspec.structs.replace(problem, what=f"{problem.what}; repairing it failed: {failed[problem.file]}")
