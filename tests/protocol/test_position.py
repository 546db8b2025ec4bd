"""Tests of positions that are written to files and read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from flowdp.policy.tally import EpochMetrics, Work
from flowdp.protocol.messages import Tick
from flowdp.protocol.position import Best, OpenEpoch, Position, decode, encode

SUMS = Work(2, 3, 12, 30.0, 1.0, losses=(4.5, 12), scalars={"accuracy": (6.0, 12.0)}, lr=0.1, wait_ms=2.0)
OPEN = OpenEpoch(2, 9, ((4, 6), (7,)), (SUMS, Work(2, 0, 0)), 2, 1.5, 0.01, 80.0)
POSITION = Position(
    2, 2, (OPEN, OpenEpoch(3, 0, ((), ()), (Work(3, 0, 0), Work(3, 0, 0)))), 40, 7, 30, 0.4, 3, 10, (5.0, 0.0)
)

OWED = EpochMetrics(
    1, 4, 0.5, {"top1": 0.5}, (), 1.0, (), (), 0.1, 1, 0.0, 1, None, 1.0, 40, owes_evaluation=True
)


def test_a_position_survives_a_file() -> None:
    for position in (
        POSITION,
        Position(1),
        replace(POSITION, best=Best(0.3, 1, 2), metric=math.nan),
        replace(POSITION, owed_epoch=OWED),
        replace(POSITION, owed_step=True),
    ):
        again = decode(json.loads(json.dumps(encode(position), allow_nan=False)))
        assert repr(again) == repr(position)  # a NaN is not equal to itself


def test_a_position_of_a_file_from_before_owes_nothing() -> None:
    told = encode(POSITION)
    del told["Position"]["owed_epoch"], told["Position"]["owed_step"]
    assert decode(told) == POSITION


def test_the_epoch_of_the_last_step() -> None:
    assert POSITION.last_epoch == 2  # the next one was opened, and nothing of it was trained
    assert replace(POSITION, open=()).last_epoch == 1
    assert Position(1).last_epoch == 0


def test_what_remains_of_an_epoch() -> None:
    assert POSITION.remaining(1) is None
    assert POSITION.remaining(2) == (9, (4, 6, 7))
    assert POSITION.remaining(5) == (0, ())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1 + 0.2, 1e-300])
def test_floats_come_back_to_the_last_bit(value: float) -> None:
    sums = Work(0, 1, 8, value, losses=(value, 8), scalars={"float": (value, 1.0), "dict": (1.0, 1.0)})
    line = json.dumps(encode(sums), allow_nan=False)
    assert repr(decode(json.loads(line))) == repr(sums)


@pytest.mark.parametrize("value", [object(), Tick(), 1j])
def test_a_foreign_value_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no record of a run can hold"):
        encode(value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"Gone": {}}, "no record is named 'Gone'"),
        ({"Position": {}, "Best": {}}, "has one key"),
        ({"Best": {"why": "x"}}, "Best of another version"),
        ({"float": "much"}, "could not convert"),
    ],
)
def test_what_encode_did_not_make(data: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(data)
