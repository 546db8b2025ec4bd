"""The judge of the lead: orders in a wrong order, and a rank that does not stop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.machine.rounds import Constraints
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.protocol.commands import Command, Send
from flowdp.protocol.messages import Order, StartEpoch, Throttle
from tests.simulator.leads import Leads
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

OPTIONS = CadenceOptions(max_batch_diff=0)
CONFIG = CoordinatorConfig(world_size=2, batches=40, epochs=1, policy="async", cadence=OPTIONS)


def decided() -> tuple[Leads, AsyncRounds]:
    """The judge, and rounds that have dealt two ranks an order of one step each."""
    rounds = AsyncRounds(Epochs(40, 1, None, 2), Cadence(2, OPTIONS), 2)
    judge = Leads(Scenario(seed=0, config=CONFIG, ms_per_step=(1.0, 1.0)))
    judge.decides(rounds.decide(0.0, Constraints()), rounds)
    return judge, rounds


def gives(rounds: AsyncRounds, *orders: Order) -> Sequence[Command]:
    for order in orders:
        if isinstance(order, StartEpoch):
            rounds._ranks[0].give(order)
    return [Send(0, order) for order in orders]


def test_batches_behind_a_throttle_are_held_back() -> None:
    judge, rounds = decided()
    judge.decides(gives(rounds, Throttle(1, "at its lead limit"), StartEpoch(0, 0, (7, 8))), rounds)


def test_batches_before_their_throttle_are_not() -> None:
    judge, rounds = decided()
    with pytest.raises(Violation, match=r"^S6: rank 0 may take 3 steps"):
        judge.decides(gives(rounds, StartEpoch(0, 0, (7, 8)), Throttle(1, "at its lead limit")), rounds)


def test_a_rank_stops_where_it_was_told() -> None:
    judge, _ = decided()
    judge.step_begins(0, 5)
    judge.delivered(0, Throttle(6, "at its lead limit"))
    judge.step_begins(0, 5)
    with pytest.raises(Violation, match=r"^S6: rank 0 begins step 6"):
        judge.step_begins(0, 6)
