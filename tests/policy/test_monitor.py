"""Tests of early stopping and the best checkpoint: verdicts on epochs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.errors import OptionError
from flowdp.policy.monitor import Best, Monitor, Verdict, judge, number_of
from flowdp.policy.tally import EpochMetrics, Tally


def epoch(number: int, loss: float | None = None, **fields: object) -> EpochMetrics:
    return replace(Tally(number, 1).result(1.0, 1, number, None), loss=loss, **fields)


def course(
    monitor: Monitor, epochs: list[EpochMetrics], *, evaluates: bool = False
) -> tuple[Best, list[Verdict]]:
    best, verdicts = Best(), []
    for metrics in epochs:
        best, verdict = judge(best, monitor, metrics, evaluates=evaluates)
        verdicts.append(verdict)
    return best, verdicts


def bests(verdicts: list[Verdict]) -> list[int]:
    return [number for number, verdict in enumerate(verdicts) if verdict.is_best]


def stops(verdicts: list[Verdict]) -> list[int]:
    return [number for number, verdict in enumerate(verdicts) if verdict.stop]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_it_stops_after_as_many_epochs_without_a_better_one(mode, sign):
    losses = [3.0, 2.0, 2.5, 1.0, 1.0, 4.0, 1.5, 0.5]
    epochs = [epoch(number, sign * loss) for number, loss in enumerate(losses)]
    best, verdicts = course(Monitor("loss", mode, 3), epochs[:7])
    assert bests(verdicts) == [0, 1, 3]
    assert stops(verdicts) == [6]
    assert best == Best(sign * 1.0, 3, 3)
    # A run resumed from there stops again if it stays as bad, but not if it gets better.
    assert judge(best, Monitor("loss", mode, 3), epochs[6], evaluates=False)[1].stop
    assert judge(best, Monitor("loss", mode, 3), epochs[7], evaluates=False) == (
        Best(sign * 0.5, 7),
        Verdict(is_best=True),
    )


def test_without_patience_it_never_stops():
    best, verdicts = course(Monitor("loss", "min"), [epoch(n, 1.0 + n) for n in range(50)])
    assert (stops(verdicts), bests(verdicts), best.bad) == ([], [0], 49)


def test_a_better_one_is_better_by_more_than_min_delta():
    values = [1.0, 0.95, 0.85, 0.8]
    for mode, sign in (("min", 1), ("max", -1)):
        epochs = [epoch(number, sign * value) for number, value in enumerate(values)]
        _, verdicts = course(Monitor("loss", mode, min_delta=0.1), epochs)
        assert bests(verdicts) == [0, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_better_and_counts(mode, value):
    best, verdicts = course(Monitor("loss", mode, 2), [epoch(0, value), epoch(1, 5.0), epoch(2, value)])
    assert bests(verdicts) == [1]
    assert best == Best(5.0, 1, 1)
    assert stops(course(Monitor("loss", mode, 2), [epoch(0, value), epoch(1, value)])[1]) == [1]


def test_the_evaluation_goes_before_the_training():
    metrics = epoch(0, 1.0, scalars={"accuracy": 0.5, "norm": 3.0}, eval={"accuracy": 0.75, "loss": 2.0})
    assert [number_of(name, metrics) for name in ("loss", "accuracy", "norm")] == [2.0, 0.75, 3.0]
    assert number_of("loss", replace(metrics, eval={})) == 1.0
    assert number_of("loss", replace(metrics, eval={}), evaluates=True) is None
    assert number_of("norm", metrics, evaluates=True) == 3.0
    assert number_of("other", metrics) is None


def test_epochs_without_their_evaluation_are_not_judged():
    """A training loss must not be compared with an evaluation's."""
    monitor = Monitor("loss", "min", 2)
    every_second = [
        epoch(number, 0.1 * number, eval={"loss": 5.0 + number} if number % 2 else {}) for number in range(6)
    ]
    best, verdicts = course(monitor, every_second, evaluates=True)
    assert (bests(verdicts), stops(verdicts)) == ([1], [5])
    assert best == Best(6.0, 1, 2)
    assert all(verdict.error is None for verdict in verdicts)


def test_an_unknown_name_is_an_error_that_lists_what_there_is():
    monitor = Monitor("acuracy", "max", 2)
    metrics = epoch(2, 1.0, scalars={"accuracy": 0.5})
    best, verdict = judge(Best(), monitor, metrics, evaluates=False)
    assert (best.epoch, best.bad, verdict.stop, verdict.is_best) == (-1, 0, False, False)
    assert verdict.error == (
        "nothing in epoch 2 is called 'acuracy', which is monitored; there are 'loss', 'accuracy'"
    )
    silent = judge(Best(), Monitor("loss", "min"), epoch(0), evaluates=False)[1]
    assert silent.error == "nothing in epoch 0 is called 'loss', which is monitored; there are no numbers"
    # An evaluation still to come may have a value of that name.
    assert judge(best, monitor, metrics, evaluates=True) == (best, Verdict())
    evaluated = replace(metrics, eval={"f1": 0.3})
    assert "'loss', 'accuracy', 'f1'" in (judge(best, monitor, evaluated, evaluates=True)[1].error or "")


@pytest.mark.parametrize("first", [0.5, math.nan])
def test_a_scalar_that_is_recorded_now_and_then_is_no_error(first):
    epochs = [epoch(0, 1.0, scalars={"f1": first}), epoch(1, 1.0), epoch(2, 1.0, scalars={"f1": 0.4})]
    best, verdicts = course(Monitor("f1", "min", 2), epochs)
    assert verdicts[1] == Verdict()
    assert best == Best(0.4, 2)


@given(
    st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=30),
    st.integers(1, 5),
    st.floats(0, 2),
)
def test_against_the_definition(values, patience, min_delta):
    best, verdicts = course(
        Monitor("loss", "min", patience, min_delta), [epoch(n, value) for n, value in enumerate(values)]
    )
    record, since, expected = None, 0, []
    for value in values:
        if not math.isnan(value) and (record is None or value < record - min_delta):
            record, since = value, 0
        else:
            since += 1
        expected.append((since == 0, since >= patience))
    assert [(verdict.is_best, verdict.stop) for verdict in verdicts] == expected
    assert best.bad == since
    assert best.value == record


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "monitor must be the name of a metric, such as 'loss', not ''"),
        ({"name": 3}, "monitor must be the name"),
        ({"mode": "least"}, "mode must be 'min' or 'max', not 'least'"),
        ({"patience": 0}, "patience must be an int of at least 1 or None, not 0"),
        ({"patience": 2.0}, "patience must be an int"),
        ({"patience": True}, "patience must be an int"),
        ({"min_delta": -0.1}, "min_delta must be a number of at least 0, not -0.1"),
        ({"min_delta": math.nan}, "min_delta must be a number"),
        ({"min_delta": "0"}, "min_delta must be a number"),
    ],
)
def test_what_cannot_be_monitored(fields, message):
    with pytest.raises(OptionError, match=message):
        Monitor(**{"name": "loss", "mode": "min", **fields})
