"""Tests of a run's callbacks: the kinds accepted."""

from __future__ import annotations

import math

import pytest

from flowdp.errors import OptionError
from flowdp.observe.callbacks import (
    EMA,
    METHODS,
    Callback,
    EarlyStopping,
    OnCheckpoint,
    check_callbacks,
    monitor_of,
)
from flowdp.policy.monitor import Monitor


class Own(Callback):
    pass


def test_every_method_is_there_and_does_nothing():
    assert {name for name in vars(Callback) if name.startswith("on_")} == {*METHODS, "on_step"}
    for name in METHODS:
        assert getattr(Own(), name)(None) is None
    assert Own.ends_run is False


def test_callbacks_keep_their_order():
    given = [Own(), EarlyStopping(), Own()]
    checked = check_callbacks(given)
    assert [id(one) for one in checked] == [id(one) for one in given]
    assert check_callbacks(one for one in given) == checked
    assert check_callbacks(()) == ()


class LooksLikeOne:
    def on_epoch_end(self, metrics):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Own(), "must be a sequence of callbacks"),
        ("on_round", "must be a sequence of callbacks"),
        ([Own], "must be instances of flowdp.Callback"),
        ([LooksLikeOne()], "must be instances of flowdp.Callback"),
        ([EarlyStopping(), Own(), EarlyStopping("accuracy", mode="max")], "has one EarlyStopping"),
        ([EMA(), EMA()], "has one EMA"),
    ],
)
def test_what_is_none(given, message):
    with pytest.raises(OptionError, match=message):
        check_callbacks(given)


def test_early_stopping_is_a_monitor():
    assert EarlyStopping().watched() == Monitor("loss", "min", 3, 0.0)
    stopping = EarlyStopping("accuracy", patience=None, mode="max", min_delta=0.01, restore_best=True)
    assert stopping.watched() == Monitor("accuracy", "max", None, 0.01)
    assert monitor_of([Own(), stopping]) == (stopping.watched(), True)
    assert monitor_of([EarlyStopping(), Own()]) == (Monitor("loss", "min", 3), False)
    assert monitor_of([Own()]) == (None, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"monitor": None}, "monitor must be the name of a metric"),
        ({"patience": -1}, "patience must be an int of at least 1 or None, not -1"),
        ({"mode": "auto"}, "mode must be 'min' or 'max'"),
        ({"min_delta": math.inf}, "min_delta must be a number"),
        ({"restore_best": "yes"}, "restore_best must be True or False, not 'yes'"),
    ],
)
def test_early_stopping_checks_what_it_gets(fields, message):
    with pytest.raises(OptionError, match=message):
        EarlyStopping(**fields)


def test_a_function_for_checkpoints():
    got = []
    callback = OnCheckpoint(got.append)
    callback.on_checkpoint("the first")
    assert got == ["the first"]
