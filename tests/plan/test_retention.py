"""What a policy lets go, and what must be seen whole before: pure decisions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.commit import Attempt
from ckpt.format.writer import Writer
from ckpt.plan.live import LIVE, classify
from ckpt.plan.retention import MAX, Best, KeepPolicy, best_of, to_delete, vouchers

WRITERS = [Writer("ckpt/1", 1, "n", "job", "host", 1, 2, None, 0.0)]


def saved(*steps: int) -> dict[Attempt, tuple[str, str]]:
    """These steps, saved one after the other by one writer."""
    return classify(WRITERS, [Attempt(step, 1, i) for i, step in enumerate(steps, 1)])


def gone(states: dict[Attempt, tuple[str, str]], policy: KeepPolicy, **options: object) -> list[int]:
    return [attempt.step for attempt in to_delete(states, policy, **options)]


def losses(states: dict[Attempt, tuple[str, str]], *values: float | None) -> dict[Attempt, dict[str, float]]:
    """The losses of live steps, oldest first; None: saved without one."""
    live = sorted(a for a, (state, _) in states.items() if state == LIVE)
    return {a: {} if v is None else {"loss": v} for a, v in zip(live, values, strict=True)}


def test_the_last_and_the_multiples_stay() -> None:
    """Superseded attempts go, the newest live step never does."""
    states = saved(10, 20, 30, 40, 50, 50)
    assert gone(states, KeepPolicy(last=2, every=20)) == [10, 30, 50]
    assert gone(states, KeepPolicy(last=1)) == [10, 20, 30, 40, 50]
    assert gone(states, KeepPolicy(last=5)) == [50]


def test_without_last_nothing_goes() -> None:
    """No policy, or one that only adds to what stays, keeps all."""
    states = saved(10, 20, 20)
    assert gone(states, KeepPolicy()) == gone(states, KeepPolicy(every=20, best=Best("loss"))) == []


def test_abandoned_steps_stay() -> None:
    """Retention is about live steps; what a newer writer left behind is for prune."""
    again = Writer("ckpt/1", 2, "n", "job", "host", 1, 2, 10, 0.0)
    states = classify([*WRITERS, again], [Attempt(10, 1, 1), Attempt(20, 1, 2), Attempt(30, 1, 3), Attempt(20, 2, 1)])
    assert gone(states, KeepPolicy(last=1)) == [10]


def test_the_best_stay_too() -> None:
    """The least or the greatest; it never makes anything go that last and every keep."""
    states = saved(1, 2, 3, 4, 5, 6)
    metrics = losses(states, 0.5, 0.1, 0.9, 0.2, 0.7, 0.8)
    assert gone(states, KeepPolicy(last=1, best=Best("loss", 2)), metrics=metrics) == [1, 3, 5]
    assert gone(states, KeepPolicy(last=1, best=Best("loss", 2, MAX)), metrics=metrics) == [1, 2, 4, 5]
    assert gone(states, KeepPolicy(last=2, every=5, best=Best("loss")), metrics=metrics) == [1, 3, 4]
    assert gone(states, KeepPolicy(last=1, best=Best("accuracy", 3)), metrics=metrics) == [1, 2, 3, 4, 5]


def test_of_equally_good_steps_the_newer_stays() -> None:
    """For either mode; -0.0 and 0.0 are equal."""
    states = saved(1, 2, 3, 4)
    for mode in ("min", "max"):
        policy = KeepPolicy(last=1, best=Best("loss", 1, mode))
        assert gone(states, policy, metrics=losses(states, -0.0, 0.0, 0.0, None)) == [1, 2]


def test_nan_and_a_missing_metric_are_never_the_best() -> None:
    """Not even when there is nothing else; infinities count as what they are."""
    states = saved(1, 2, 3, 4)
    live = sorted(states)
    for mode in ("min", "max"):
        metrics = losses(states, math.nan, None, math.nan, 7.0)
        assert [a.step for a in best_of(live, Best("loss", 4, mode), metrics)] == [4]
    metrics = losses(states, math.inf, -math.inf, math.nan, 0.0)
    assert [a.step for a in best_of(live, Best("loss", 4), metrics)] == [2, 4, 1]


def test_held_steps_stay() -> None:
    """Live ones and superseded ones, and they take nobody else's place."""
    states = saved(1, 2, 2, 3)
    old, superseded = Attempt(1, 1, 1), Attempt(2, 1, 2)
    assert gone(states, KeepPolicy(last=1), held={old, superseded}) == [2]
    assert gone(states, KeepPolicy(last=1), held={Attempt(3, 1, 4)}) == [1, 2, 2]


def test_vouchers_are_newer_than_all_that_goes() -> None:
    """A kept step from long ago says nothing about what is lost now."""
    states = saved(1000, 1500, 1999, 2000, 2001)
    going = to_delete(states, KeepPolicy(last=2, every=1000))
    assert [a.step for a in going] == [1500, 1999]
    assert [a.step for a in vouchers(states, going)] == [2001, 2000]
    assert vouchers(states, []) == []
    again = saved(1, 1)
    assert vouchers(again, to_delete(again, KeepPolicy(last=1))) == [Attempt(1, 1, 2)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20).map(sorted),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.none() | st.builds(Best, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
    st.lists(st.none() | st.floats(), min_size=20, max_size=20),
)
def test_whatever_the_policy(
    steps: list[int], last: int, every: int | None, best: Best | None, values: list[float | None]
) -> None:
    """The newest live steps stay, more rules never delete more, and someone can vouch for whatever goes."""
    states = saved(*steps)
    live = sorted(a for a, (state, _) in states.items() if state == LIVE)
    metrics = losses(states, *values[: len(live)])
    going = to_delete(states, KeepPolicy(last, every, best), metrics)
    assert not set(going) & set(live[-last:])
    assert (
        set(going)
        <= set(to_delete(states, KeepPolicy(last, every), metrics))
        <= set(to_delete(states, KeepPolicy(last), metrics))
    )
    assert not going or vouchers(states, going)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_order_of_the_dict_does_not_matter(mode: str) -> None:
    """The same answer, however the states are listed."""
    states = saved(1, 2, 3, 4, 5)
    metrics = losses(states, 1.0, 0.0, 1.0, 0.0, 0.5)
    backwards = dict(reversed(states.items()))
    policy = KeepPolicy(last=1, best=Best("loss", 1, mode))
    assert to_delete(states, policy, metrics) == to_delete(backwards, policy, metrics)
