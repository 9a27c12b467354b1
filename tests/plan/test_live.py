"""Live steps and retention, as pure decisions."""

from __future__ import annotations

from ckpt.format.commit import Attempt
from ckpt.format.writer import Writer
from ckpt.plan.live import ABANDONED, LIVE, SUPERSEDED, candidates, classify


def writer(number: int, resumed_from: int | None, world: int = 2) -> Writer:
    """A writer record; world 0 is a rollback."""
    return Writer("ckpt/1", number, "n", f"job {number}", "host", 1, world, resumed_from, 0.0)


W = [writer(1, None), writer(2, 200), writer(3, 200, world=0)]
SAVED = [Attempt(100, 1, 1), Attempt(200, 1, 2), Attempt(300, 1, 3), Attempt(400, 1, 4), Attempt(300, 2, 1)]


def test_a_later_writer_hides_what_came_after_its_start() -> None:
    """After a fall-back to 200 the old 300 and 400 are abandoned and the new 300 is live."""
    states = classify(W[:2], SAVED)
    assert [a for a, (state, _) in states.items() if state == LIVE] == [SAVED[4], SAVED[1], SAVED[0]]
    assert states[SAVED[3]] == (ABANDONED, "writer 2 (job 2 on host) went on from step 200")


def test_a_rollback_is_one_more_writer() -> None:
    """It hides the steps after it of every writer before it."""
    states = classify(W, SAVED)
    assert sorted(a.step for a, (state, _) in states.items() if state == LIVE) == [100, 200]
    assert states[SAVED[4]] == (ABANDONED, "writer 3 (job 3 on host) rolled back to step 200")


def test_a_writer_that_started_anew_hides_all() -> None:
    """resumed_from None means that nothing older counts."""
    states = classify([*W, writer(4, None)], SAVED)
    assert {state for state, _ in states.values()} == {ABANDONED}


def test_the_same_step_again_supersedes() -> None:
    """Of one step the newest attempt is live, within a writer and across writers."""
    again = [*SAVED, Attempt(200, 2, 2), Attempt(300, 2, 3)]
    states = classify(W[:2], again)
    assert states[Attempt(200, 1, 2)] == (SUPERSEDED, "saved again as w2.2")
    assert states[Attempt(300, 2, 1)] == (SUPERSEDED, "saved again as w2.3")


def test_candidates_come_newest_first_and_numerically() -> None:
    """1000 comes before 999: numbers, not text."""
    attempts = [Attempt(step, 1, i) for i, step in enumerate([9, 10, 99, 100, 999, 1000])]
    assert [a.step for a in candidates([writer(1, None)], attempts)] == [1000, 999, 100, 99, 10, 9]


def test_an_attempt_of_an_unknown_writer_is_not_live() -> None:
    """A folder that no writer record vouches for is nobody's step."""
    assert classify(W[:1], [Attempt(5, 9, 1)])[Attempt(5, 9, 1)] == (ABANDONED, "writer 9 has no record")
