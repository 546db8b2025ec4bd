"""Tests of the common parts of all rounds."""

from __future__ import annotations

from typing import get_args

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.epochs import Epochs
from flowdp.machine.policies import ROUNDS, make_rounds
from flowdp.machine.rounds import Averages, Shares, outcome_of, reason_of, summary
from flowdp.options import Policy
from flowdp.protocol.commands import Send
from flowdp.protocol.messages import Outcome, StartEpoch, SyncAck, Work
from tests.invariants import check


@pytest.mark.parametrize("policy", get_args(Policy))
def test_they_begin_idle_and_order_nothing_on_hold(policy: Policy) -> None:
    config = CoordinatorConfig(
        world_size=2, batches=4, epochs=1, policy=policy, global_batch=GlobalBatch(8, 30)
    )
    rounds = make_rounds(config, Epochs(config))
    assert rounds.shares in get_args(Shares)
    assert rounds.averages in get_args(Averages)
    assert (rounds.is_idle, rounds.wants_meeting, rounds.global_step, rounds.next_round) == (
        True,
        False,
        0,
        0,
    )
    assert rounds.decide(0.0, hold=True) == []
    commands = rounds.decide(0.0)
    assert {c.rank for c in commands if isinstance(c, Send) and isinstance(c.order, StartEpoch)} == {0, 1}
    assert not rounds.is_idle
    assert rounds.pop_bad() == {}
    check(rounds)


def test_only_exact_averages_gradients_and_only_async_snapshots() -> None:
    assert {policy: rounds.averages for policy, rounds in ROUNDS.items()} == {
        "sync": "parameters",
        "cadence": "parameters",
        "async": "snapshots",
        "exact": "gradients",
    }


def test_reports_of_a_rank_are_added_up() -> None:
    both = Work(0, 1, 8, 5.0, 1.0, losses=(8.0, 8)) + Work(0, 2, 16, 7.0, 0.5, losses=(48.0, 16))
    works = [both, Work(0, 0, 0)]
    fields = summary(works, Work(0, 2, 16, lr=0.1, group_lrs={"a": 0.1, "b": 0.2}))
    assert (fields["busy_ms"], fields["data_ms"], fields["loss"]) == ((12.0, 0.0), (1.5, 0.0), 56.0 / 24)
    assert (fields["lr"], fields["group_lrs"]) == (0.1, {"a": 0.1, "b": 0.2})
    nothing = summary(works[1:], works[1])
    assert (nothing["loss"], nothing["lr"]) == (None, 0.0)


def test_all_are_told_the_same() -> None:
    told = Outcome(5, 10, (0, 1), (1, 1), (8, 8))
    acks = {rank: SyncAck(rank, told, Work(0, 1, 8)) for rank in (0, 1)}
    assert outcome_of(acks) is told
    acks[1] = SyncAck(1, Outcome(5, 11, (0, 1), (2, 1), (16, 8)), Work(0, 1, 8))
    with pytest.raises(ProtocolError, match="rank 1 left round 5 with another outcome"):
        outcome_of(acks)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"left": (1, 2), "bad": (0,), "hurried": True}, "rank 1, 2 left"),
        ({"bad": (0,), "stop": True}, "rank 0 had NaN or inf parameters"),
        ({"stop": True, "pause": True, "hurried": True}, "the run stops"),
        ({"pause": True, "halt": True}, "a pause begins"),
        ({"halt": True, "hurried": True}, "an evaluation, a checkpoint or a copy is due"),
        ({"hurried": True}, "it took too long and was cut short"),
        ({"lr": 0.1}, ""),
    ],
)
def test_the_reason_of_an_outcome(fields: dict[str, object], said: str) -> None:
    assert reason_of(Outcome(0, 2, (0, 1), (1, 1), (8, 8), **fields)) == said  # type: ignore[arg-type]


def test_shares_are_reported_when_they_have_changed() -> None:
    config = CoordinatorConfig(world_size=2, batches=4, epochs=1)
    rounds = make_rounds(config, Epochs(config))
    told = [rounds._changed_shares(weights) for weights in ((10, 10), (51, 50), (), (30, 10), (30, 10))]
    assert told == [(), (), (), (0.75, 0.25), ()]
    assert rounds._changed_shares((30, 0)) == (1.0, 0.0)
