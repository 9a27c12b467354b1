"""Every operation, killed at its kill points: before, halfway through and after each change and each message.

By default a sample that is spread evenly and has all that is around COMMIT, deletion and the writer's record;
with CKPT_KILL_POINTS=all every point, each named with what came of it, also in the file CKPT_KILL_POINTS_REPORT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.testing.kill_points import Point
from tests.crash.kill_rounds import OPERATIONS, Operation, Outcome, Rounds

ALL = os.environ.get("CKPT_KILL_POINTS") == "all"
THREADS = 2
SPREAD = 6  # of all points of an operation in the short form, beside the interesting ones


def is_interesting(point: Point) -> bool:
    """Whether a short run has this one too: where a step begins or ceases to be, and where a save changes hands."""
    if point.call in {"send", "receive"}:
        return point.what in {"begin", "ready", "staged", "saved"} and point.when != "halfway through"
    if point.call in {"open", "write", "truncate"}:
        return False
    if point.what.endswith("COMMIT"):
        return True
    return point.what == "writers/000001.json" or (point.call == "rmdir" and point.when == "after")


def sample(points: list[Point]) -> list[Point]:
    """Those to be killed at."""
    if ALL:
        return points
    spread = {round(place * (len(points) - 1) / (SPREAD - 1)) for place in range(SPREAD)}
    return [point for place, point in enumerate(points) if place in spread or is_interesting(point)]


def changes(points: list[Point]) -> list[Point]:
    """Of the process that makes the step, what it does to the run: one call after the other, in this order."""
    return [point for point in points if point.process == "keeper" and point.call not in {"send", "receive"}
            and not point.what.startswith("the job's")]  # fmt: skip


def allowed(operation: Operation, points: list[Point], outcome: Outcome, point: Point) -> set[int | None]:
    """What the latest step may be after a kill: exactly what was promised, where something was."""
    old, new = operation.old, operation.new
    if {"committed", "done"} & set(outcome.said):
        return {new}
    if operation.process != "trainer":
        return {old, new, *operation.between}
    if point.process == "keeper":
        done = changes(points)
        if point in done:  # the step exists from COMMIT's link on
            made = next(place for place, other in enumerate(done) if other.what.endswith("COMMIT"))
            return {old if done.index(point) <= made else new}
        return {new} if point.what == "saved" else {old, new}
    if point.what == "staged":  # heard by another thread than the one that has sent what it answers
        return {new}
    mine = [other for other in points if other.process == "trainer"]
    if mine.index(point) < next(place for place, other in enumerate(mine) if str(other) == "trainer: after send ready"):
        return {old}  # the snapshot was not whole
    return {new} if "staged" in outcome.said else {old, new}


def check(operation: Operation, points: list[Point], outcome: Outcome, point: Point) -> None:
    """What must hold after any kill."""
    assert outcome.looks is not None
    first, again, swept = outcome.looks
    assert first.latest in allowed(operation, points, outcome, point), outcome
    for look in outcome.looks:
        if look is first and operation.damaged:
            assert look.files <= set(operation.damaged), f"{outcome}: {look.problems}"
        else:
            assert not look.problems, f"{outcome}: {look.problems}"
        assert all(step == content for step, content in look.steps.items()), f"{outcome}: mixed: {look.steps}"
    if point.process == "keeper" and "committed" not in outcome.said:
        assert outcome.raised.startswith("KeeperError"), f"{outcome}: nobody was told: {outcome.raised!r}"
    assert again.latest == operation.new, outcome
    assert set(operation.stay) <= set(first.steps), outcome
    assert set(again.steps) == set(operation.left), outcome
    assert (swept.latest, swept.steps, swept.debris) == (again.latest, again.steps, []), f"{outcome}: {swept}"


@pytest.fixture(scope="module")
def report() -> Iterator[Callable[[str], None]]:
    """Says a line, also in the file that was asked for; in the end how many points there were."""
    path = os.environ.get("CKPT_KILL_POINTS_REPORT")
    file = open(path, "w") if path else None  # noqa: SIM115 - closed below
    survived = total = 0

    def say(line: str) -> None:
        print(line)  # noqa: T201 - the report
        if file is not None:
            print(line, file=file, flush=True)

    def tally(line: str, of: int = 0, counted: int = 0) -> None:
        nonlocal survived, total
        survived, total = survived + counted, total + of
        say(line)

    yield tally
    say(f"kill points {survived} of {total}, all operations")
    if file is not None:
        file.close()


@pytest.mark.timeout(1800 if ALL else 300)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_killed_at_every_point(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[..., None]
) -> None:
    """Whoever dies, and wherever: the old step or the new one, whole; it can be done again; the debris is swept."""
    operation = OPERATIONS[name]
    threads = [Rounds(operation, tmp_path / f"thread-{number}") for number in range(THREADS if ALL else 1)]
    try:
        points = threads[0].record()
        chosen = sample(points)
        report(f"\n{name}: {len(points)} kill points, killed at {len(chosen)} of them")

        wrong: list[str] = []

        def kill(place: int) -> None:
            point = chosen[place]
            try:
                outcome = threads[place % len(threads)].kill_at(point, place)
                check(operation, points, outcome, point)
            except AssertionError as error:
                wrong.append(f"{point}: {error}")
                report(f"{name} | NOT SURVIVED: {wrong[-1]}")
            else:
                report(f"{name} | {outcome}")

        def kill_all(first: int) -> None:
            for place in range(first, len(chosen), len(threads)):
                kill(place)

        with ThreadPoolExecutor() as pool:
            list(pool.map(kill_all, range(len(threads))))
        survived = len(chosen) - len(wrong)
        report(
            f"{name}: survived {survived} of {len(chosen)}, kill points {survived} of {len(points)}",
            len(points),
            survived,
        )
        assert not wrong, "\n".join(wrong)
    finally:
        for rounds in threads:
            rounds.close()
