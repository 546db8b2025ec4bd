"""Tests of records of rounds: sums and means of the ranks' reports."""

from __future__ import annotations

import pytest

from flowdp.machine.round_record import ShareChanges, mean_loss, reason_of, round_ended
from flowdp.protocol.messages import Outcome, Work


def test_mean_loss() -> None:
    works = [Work(0, 1, 8, losses=(8.0, 8)), Work(0, 1, 2, losses=(12.0, 2))]
    assert mean_loss(works) == 2.0
    assert mean_loss([]) is None


def test_reports_of_a_rank_are_added_up() -> None:
    works = [
        [Work(0, 1, 8, 5.0, 1.0, losses=(8.0, 8)), Work(0, 2, 16, 7.0, 0.5, losses=(48.0, 16))],
        [],
    ]
    record = round_ended(
        works,
        round=3,
        rounds=1,
        epoch=0,
        global_step=9,
        steps=[2, 0],
        samples=[16, 0],
        last=Work(0, 2, 16, lr=0.1, group_lrs={"a": 0.1, "b": 0.2}),
        wall_ms=20.0,
        wait_ms=[0.0, 4.0],
        sync_ms=1.0,
        anchor=10,
        drift=None,
        reason="",
    )
    assert (record.steps, record.samples) == ((2, 0), (16, 0))  # from the mean, not from the reports
    assert (record.busy_ms, record.data_ms, record.wait_ms) == ((12.0, 0.0), (1.5, 0.0), (0.0, 4.0))
    assert record.loss == 56.0 / 24
    assert (record.lr, record.group_lrs) == (0.1, {"a": 0.1, "b": 0.2})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"left": (1, 2), "bad": (0,), "hurried": True}, "rank 1, 2 left"),
        ({"bad": (0,), "stop": True}, "rank 0 had NaN or inf parameters"),
        ({"stop": True, "pause": True, "hurried": True}, "stop"),
        ({"pause": True, "halt": True}, "pause"),
        ({"halt": True, "hurried": True}, "halt"),
        ({"hurried": True}, "hurried"),
        ({"lr": 0.1}, ""),
    ],
)
def test_the_reason_of_an_outcome(fields: dict[str, object], said: str) -> None:
    assert reason_of(Outcome(0, 2, (0, 1), (1, 1), (8, 8), **fields)) == said  # type: ignore[arg-type]


def test_shares_are_reported_when_they_have_changed() -> None:
    changes = ShareChanges(2)
    assert changes.report((10, 10)) == ()
    assert changes.report((51, 50)) == ()
    assert changes.report(()) == ()
    assert changes.report((30, 10)) == (0.75, 0.25)
    assert changes.report((30, 10)) == ()
    assert changes.report((30, 0)) == (1.0, 0.0)
