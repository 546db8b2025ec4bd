"""Tests of early stopping and the best checkpoint: verdicts on epochs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.monitor import Best, Monitor, judge, number_of
from flowdp.policy.tally import EpochMetrics, Tally


def epoch(number: int, loss: float | None = None, **fields: object) -> EpochMetrics:
    return replace(Tally(number, 1).result(1.0, 1, number, None), loss=loss, **fields)


def course(monitor: Monitor, epochs: list[EpochMetrics], *, evaluates: bool = False) -> list[Best]:
    """The best value behind each epoch."""
    best, course = Best(), []
    for metrics in epochs:
        best, error = judge(best, monitor, metrics, evaluates=evaluates)
        assert error is None
        course.append(best)
    return course


def bests(course: list[Best]) -> list[int]:
    return [number for number, best in enumerate(course) if best.epoch == number]


def stops(monitor: Monitor, course: list[Best]) -> list[int]:
    return [number for number, best in enumerate(course) if monitor.is_enough(best)]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_it_stops_after_as_many_epochs_without_a_better_one(mode, sign):
    losses = [3.0, 2.0, 2.5, 1.0, 1.0, 4.0, 1.5, 0.5]
    epochs = [epoch(number, sign * loss) for number, loss in enumerate(losses)]
    monitor = Monitor("loss", mode, 3)
    found = course(monitor, epochs[:7])
    assert bests(found) == [0, 1, 3]
    assert stops(monitor, found) == [6]
    assert found[-1] == Best(sign * 1.0, 3, 3)
    # A run resumed from there stops again if it stays as bad, but not if it gets better.
    assert monitor.is_enough(judge(found[-1], monitor, epochs[6], evaluates=False)[0])
    assert judge(found[-1], monitor, epochs[7], evaluates=False) == (Best(sign * 0.5, 7), None)


def test_without_patience_it_never_stops():
    monitor = Monitor("loss", "min")
    found = course(monitor, [epoch(n, 1.0 + n) for n in range(50)])
    assert (stops(monitor, found), bests(found), found[-1].bad) == ([], [0], 49)


def test_a_better_one_is_better_by_more_than_min_delta():
    values = [1.0, 0.95, 0.85, 0.8]
    for mode, sign in (("min", 1), ("max", -1)):
        epochs = [epoch(number, sign * value) for number, value in enumerate(values)]
        assert bests(course(Monitor("loss", mode, min_delta=0.1), epochs)) == [0, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_better_and_counts(mode, value):
    monitor = Monitor("loss", mode, 2)
    found = course(monitor, [epoch(0, value), epoch(1, 5.0), epoch(2, value)])
    assert bests(found) == [1]
    assert found[-1] == Best(5.0, 1, 1)
    assert stops(monitor, course(monitor, [epoch(0, value), epoch(1, value)])) == [1]


def test_the_evaluation_goes_before_the_training():
    metrics = epoch(0, 1.0, scalars={"accuracy": 0.5, "norm": 3.0}, eval={"accuracy": 0.75, "loss": 2.0})
    assert [number_of(name, metrics) for name in ("loss", "accuracy", "norm")] == [2.0, 0.75, 3.0]
    assert number_of("loss", replace(metrics, eval={})) == 1.0
    assert number_of("loss", replace(metrics, eval={}), evaluates=True) is None
    assert number_of("norm", metrics, evaluates=True) == 3.0
    assert number_of("other", metrics) is None


def test_an_unknown_name_is_an_error_that_lists_what_there_is():
    monitor = Monitor("acuracy", "max", 2)
    metrics = epoch(2, 1.0, scalars={"accuracy": 0.5})
    best, error = judge(Best(), monitor, metrics, evaluates=False)
    assert best == Best()
    assert error == (
        "nothing in epoch 3 is called 'acuracy', which is monitored; there are 'loss', 'accuracy'"
    )
    _, silent = judge(Best(), Monitor("loss", "min"), epoch(0), evaluates=False)
    assert silent == "nothing in epoch 1 is called 'loss', which is monitored; there are no numbers"
    # An evaluation still to come may have a value of that name.
    assert judge(best, monitor, metrics, evaluates=True) == (best, None)
    evaluated = replace(metrics, eval={"f1": 0.3})
    assert "'loss', 'accuracy', 'f1'" in (judge(best, monitor, evaluated, evaluates=True)[1] or "")


@given(
    st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=30),
    st.integers(1, 5),
    st.floats(0, 2),
)
def test_against_the_definition(values, patience, min_delta):
    monitor = Monitor("loss", "min", patience, min_delta)
    found = course(monitor, [epoch(n, value) for n, value in enumerate(values)])
    record, since, expected = None, 0, []
    for value in values:
        if not math.isnan(value) and (record is None or value < record - min_delta):
            record, since = value, 0
        else:
            since += 1
        expected.append((since == 0, since >= patience))
    assert [(best.epoch == n, monitor.is_enough(best)) for n, best in enumerate(found)] == expected
    assert found[-1].bad == since
    assert found[-1].value == record


@pytest.mark.parametrize(("mode", "best"), [("min", ["c", "b", "g"]), ("max", ["f", "a", "k"])])
def test_the_best_few_of_several(mode, best):
    values = [3.0, 1.0, 0.5, math.nan, 2.0, 9.0, 1.0, math.inf, -math.inf, None, 3.0]
    found = Monitor("loss", mode).best_of(zip(values, "abcdefghijk", strict=True), 3)
    assert [one for _, one in found] == best
    assert Monitor("loss", mode).best_of([], 3) == []
