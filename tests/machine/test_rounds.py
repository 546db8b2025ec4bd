"""Tests of the common parts of all rounds."""

from __future__ import annotations

from typing import get_args

import pytest

from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.epochs import Epochs
from flowdp.machine.policies import ROUNDS, make_rounds
from flowdp.machine.rounds import Averages, Constraints, Shares
from flowdp.options import Policy
from flowdp.protocol.commands import Send
from flowdp.protocol.messages import StartEpoch


@pytest.mark.parametrize("policy", get_args(Policy))
def test_they_begin_idle_and_order_nothing_on_hold(policy: Policy) -> None:
    config = CoordinatorConfig(
        world_size=2, batches=4, epochs=1, policy=policy, global_batch=GlobalBatch(8, 30)
    )
    rounds = make_rounds(config, Epochs(4, 1, None, 2))
    assert rounds.shares in get_args(Shares)
    assert rounds.averages in get_args(Averages)
    assert (rounds.is_idle, rounds.wants_meeting, rounds.global_step, rounds.next_round) == (
        True,
        False,
        0,
        0,
    )
    assert rounds.decide(0.0, Constraints(hold=True)) == []
    commands = rounds.decide(0.0, Constraints())
    assert {c.rank for c in commands if isinstance(c, Send) and isinstance(c.order, StartEpoch)} == {0, 1}
    assert not rounds.is_idle
    assert rounds.pop_bad() == {}
    rounds.check()


def test_only_exact_averages_gradients_and_only_async_snapshots() -> None:
    assert {policy: rounds.averages for policy, rounds in ROUNDS.items()} == {
        "sync": "parameters",
        "cadence": "parameters",
        "async": "snapshots",
        "exact": "gradients",
    }
