"""Verify: every byte of a step read and compared with what COMMIT pins. Lists every problem, not the first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import msgspec

from ckpt.errors import BadInputError, DamagedError, NotFoundError, UnsupportedFormatError
from ckpt.format.commit import COMMIT
from ckpt.reading.report import Problem, Progress, VerifyReport
from ckpt.reading.step import StepReader
from ckpt.reading.verifier import Verifier, without_place
from ckpt.run import Run, StepState

__all__ = ["Problem", "Progress", "VerifyReport", "verify", "verify_all", "verify_attempt"]


def verify(
    run: str | os.PathLike[str] | Run, step: int | str = "latest", *, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte of a step and compare it with what COMMIT pins; needs no process group and no torch.

    A newer attempt whose COMMIT is torn counts as a problem of the latest step: without the damage
    it would be the latest. Raises NotFoundError when there is no such step and
    UnsupportedFormatError for a version or feature that this reader does not know.
    """
    if step != "latest" and (isinstance(step, bool) or not isinstance(step, int)):
        raise BadInputError(f"step={step!r}: expected a step number or 'latest'")
    opened = run if isinstance(run, Run) else Run.open(run)
    passed: list[StepState] = []
    try:
        found = opened.find(step if isinstance(step, int) else None)
    except (DamagedError, NotFoundError) as error:
        damaged = [s for s in _candidates(opened) if s.state == "damaged" and step in {"latest", s.attempt.step}]
        if not damaged:
            raise error from None
        return _of_damaged(opened, damaged)
    for state in _candidates(opened):
        if state.attempt == found.attempt:
            break
        if step in {"latest", state.attempt.step} and state.state in {"damaged", "unsupported"}:
            passed.append(state)
    newer = next((state for state in passed if state.state == "unsupported"), None)
    if newer is not None:
        raise UnsupportedFormatError(newer.why)
    with contextlib.ExitStack() as holding:
        try:
            holding.enter_context(opened.hold(found.attempt))
        except NotFoundError:  # deleted between the two looks
            return verify(run, step, progress=progress)
        report = verify_attempt(opened, found, progress)
    return msgspec.structs.replace(report, problems=(*_commit_problems(opened, passed), *report.problems))


def verify_all(run: str | os.PathLike[str] | Run, progress: Progress | None = None) -> Iterator[VerifyReport]:
    """Verify every committed step, live or not, oldest first; a COMMIT that cannot be read is a problem of its own."""
    opened = run if isinstance(run, Run) else Run.open(run)
    opened.require()
    for state in opened.survey().steps:
        if state.commit is not None:
            with contextlib.ExitStack() as holding:
                try:
                    holding.enter_context(opened.hold(state.attempt))
                except NotFoundError:  # deleted meanwhile
                    continue
                report = verify_attempt(opened, state, progress)
            yield report
        elif state.state != "incomplete":
            yield _of_damaged(opened, [state])


def verify_attempt(run: Run, state: StepState, progress: Progress | None = None) -> VerifyReport:
    """Verify one committed attempt, live or not."""
    return Verifier(StepReader.of(run, state), progress).report()


def _candidates(run: Run) -> Iterator[StepState]:
    run.require()
    return run.live_steps()


def _commit_problems(run: Run, states: Sequence[StepState]) -> list[Problem]:
    return [Problem(run.key(s.attempt, COMMIT), without_place(run, s.attempt.folder, s.why)) for s in states]


def _of_damaged(run: Run, states: Sequence[StepState]) -> VerifyReport:
    attempt = states[0].attempt
    problems = tuple(_commit_problems(run, states))
    return VerifyReport(run.url, attempt.step, attempt.label, problems, (), 0, 0, 0)
