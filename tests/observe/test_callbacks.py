"""Tests of a run's callbacks: the kinds accepted."""

from __future__ import annotations

import math

import pytest

from flowdp.errors import OptionError
from flowdp.observe.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    OnCheckpoint,
    check_callbacks,
)


class Own(Callback):
    pass


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
