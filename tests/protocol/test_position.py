"""Tests of positions read from files: checked before use."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.event_log import decode, encode
from flowdp.policy.tally import EpochMetrics, RankMetrics, RankSums
from flowdp.protocol.position import Best, OpenEpoch, Position, check_types

SUMS = RankSums(3, 12, 30.0, 1.0, 2.0, 0.5, (4.5, 12), {"accuracy": (6.0, 12.0)}, 0.1)
OPEN = OpenEpoch(2, 9, ((4, 6), (7,)), (SUMS, RankSums()), 2, 1.5, 0.01, 80.0)
POSITION = Position(
    2, 2, (OPEN, OpenEpoch(3, 0, ((), ()), (RankSums(), RankSums()))), 40, 7, 30, 0.4, 3, 10, (5.0, 0.0)
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
        position.check()
        again = decode(json.loads(json.dumps(encode(position), allow_nan=False)))
        again.check()
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world_size": 0}, "negative"),
        ({"world_size": 3}, "per rank"),
        ({"world_size": True}, "world_size is True"),
        ({"done": -1, "open": ()}, "negative"),
        ({"done": 1}, "open epochs"),
        ({"open": (OPEN, OPEN)}, "open epochs"),
        ({"open": [OPEN]}, "open is"),
        ({"open": (SUMS,)}, "not a OpenEpoch"),
        ({"global_step": -1}, "negative"),
        ({"global_step": 1.0}, "global_step is 1.0"),
        ({"metric": "0.4"}, "metric is '0.4'"),
        ({"versions": None}, "versions is None"),
        ({"anchor": -1}, "anchor"),
        ({"pace_ms": (1.0,)}, "pace_ms"),
        ({"pace_ms": (1.0, -1.0)}, "pace_ms"),
        ({"pace_ms": (1.0, math.nan)}, "pace_ms"),
        ({"best": Best(0.3, -2, 0)}, "best"),
        ({"best": None}, "best"),
        ({"owed_epoch": OWED, "done": 1, "open": ()}, "last complete epoch"),
        ({"owed_epoch": replace(OWED, owes_evaluation=False)}, "last complete epoch"),
        ({"owed_epoch": OWED, "owed_step": True}, "are owed"),
        ({"owed_epoch": replace(OWED, loss="0.5")}, "loss is '0.5'"),
        ({"owed_step": 1}, "owed_step is 1"),
    ],
)
def test_what_no_run_can_stand_at(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(POSITION, **change).check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position": 6}, "not dealt"),
        ({"position": -1, "left": ((), ())}, "negative"),
        ({"left": ((4, 6), (4,))}, "twice"),
        ({"left": ((4, -6), (7,))}, "not dealt"),
        ({"left": ((4, 6),)}, "per rank"),
        ({"left": ((4, "6"), (7,))}, "left"),
        ({"sums": (SUMS,)}, "per rank"),
        ({"sums": (SUMS, replace(SUMS, steps=-1))}, "negative"),
        ({"sums": (SUMS, replace(SUMS, busy_ms=math.nan))}, "time"),
        ({"sums": (SUMS, replace(SUMS, losses=(1.0,)))}, "losses"),
        ({"sums": (SUMS, replace(SUMS, scalars={"a": 1.0}))}, "scalars"),
        ({"sums": (SUMS, replace(SUMS, scalars={3: (1.0, 1.0)}))}, "scalars"),
        ({"sums": (SUMS, replace(SUMS, scalars=()))}, "scalars"),
        ({"spent_ms": -1.0}, "time"),
        ({"rounds": -1}, "negative"),
    ],
)
def test_what_no_epoch_can_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(POSITION, open=(replace(OPEN, **change),)).check()


def test_types_of_any_record() -> None:
    rank = RankMetrics(1, 1, 1.0, 0, 0.0, 0.0, math.nan, {}, 0.1)
    record = EpochMetrics(0, None, 0.5, {"a": 1}, (rank,), 1.0, (1.0,), (1.0,), 0.1, 1, 0.0, 10, None, 1.0, 3)
    check_types(record, EpochMetrics, "history[0]")
    for bad in (replace(record, loss="0.5"), replace(record, per_rank=(None,)), replace(record, eval=[])):
        with pytest.raises(ValueError, match=r"history\[0\]\.(loss|per_rank|eval)"):
            check_types(bad, EpochMetrics, "history[0]")
