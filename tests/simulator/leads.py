"""The judge of the lead in asynchronous rounds: it stays within the limit, or the count of the round.

The limit is judged by what the ranks do: no rank begins a step with more steps than `max_batch_diff` beyond
those of a rank that is training, both counted from the last mean that both have. Without a limit, two facts
prove the count. At each decision, the steps that a rank can take with the orders it was sent, in the order in
which they were sent, are within the bound. And no rank begins a step beyond the `Throttle` it has read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowdp.machine.async_rounds import AsyncRounds
from flowdp.protocol.commands import Command, Send
from flowdp.protocol.messages import Order, StartEpoch, Throttle
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

__all__ = ["Leads"]


class Leads:
    """Judges the lead of each rank.

    Args:
        scenario: The run.
    """

    def __init__(self, scenario: Scenario) -> None:
        world_size = scenario.config.world_size
        self._lead = scenario.config.cadence.max_batch_diff
        self._held = [[0] for _ in range(world_size)]  # steps of each rank in each mean that it has
        self._snapshots = [0] * world_size  # steps in its last snapshot
        self._sent = [math.inf] * world_size  # limits that are on their way, or read
        self._read = [math.inf] * world_size
        self._was_exhausted = False
        self._reach = [0.0] * world_size  # steps that a rank can take with what it was sent

    # ------------------------------------------------------------------ what the ranks do
    def snapped(self, rank: int, taken: int) -> None:
        """A rank puts its snapshot down, after so many steps."""
        self._snapshots[rank] = taken

    def applied(self, rank: int) -> None:
        """A rank has applied the mean of its last snapshot."""
        self._held[rank].append(self._snapshots[rank])

    def met(self, rank: int, taken: int) -> None:
        """A rank leaves the gate with the mean, after so many steps."""
        self._held[rank].append(taken)

    def step_begins(self, rank: int, taken: Sequence[int], is_moving: Sequence[bool]) -> None:
        """A rank begins a step, after so many steps of each."""
        if taken[rank] >= self._read[rank]:
            raise Violation(
                "S6", f"rank {rank} begins step {taken[rank]}, and was to stop at {self._read[rank]}"
            )
        if self._lead is None:
            return
        for other, moves in enumerate(is_moving):
            if moves and other != rank:
                mine, theirs = self._held[rank], self._held[other]
                last = min(len(mine), len(theirs)) - 1
                lead = (taken[rank] - mine[last]) - (taken[other] - theirs[last])
                if lead > self._lead:
                    raise Violation("S6", f"rank {rank} leads rank {other} by {lead} steps")

    # ------------------------------------------------------------------ what the coordinator decides
    def decides(self, commands: Sequence[Command], rounds: AsyncRounds) -> None:
        """The coordinator has decided."""
        # A round that a meeting ends takes its snapshots back; what was allowed by them stays allowed.
        orders = [command.order for command in commands if isinstance(command, Send)]
        judges = not any(isinstance(order, StartEpoch) and order.sync is not None for order in orders)
        for rank, state in enumerate(rounds._ranks):
            mine = [c.order for c in commands if isinstance(c, Send) and c.rank == rank]
            dealt = state.dealt - sum(order.steps for order in mine if isinstance(order, StartEpoch))
            self._reach[rank] = min(self._reach[rank], self._sent[rank], dealt)
            for order in mine:
                if isinstance(order, Throttle):
                    self._sent[rank] = order.limit
                elif isinstance(order, StartEpoch):
                    dealt += order.steps
                reach = min(self._sent[rank], dealt)
                if judges and reach > max(self._reach[rank], self._bound(rank, rounds)):
                    raise Violation("S6", f"rank {rank} may take {reach} steps: {order} lets it")
                self._reach[rank] = reach
        self._was_exhausted = rounds.epochs.is_exhausted

    def delivered(self, rank: int, order: Order) -> None:
        """A rank reads an order before its next step."""
        if isinstance(order, Throttle):
            self._read[rank] = order.limit

    def _bound(self, rank: int, rounds: AsyncRounds) -> float:
        """Most steps that a rank may be allowed, by the data left before the decision or behind it."""
        now = rounds.epochs.is_exhausted
        return max(self._bound_by(rank, rounds, is_exhausted) for is_exhausted in {now, self._was_exhausted})

    def _bound_by(self, rank: int, rounds: AsyncRounds, is_exhausted: bool) -> float:
        states = rounds._ranks
        others = any(
            other != rank and (state.orders or not is_exhausted) for other, state in enumerate(states)
        )
        if self._lead is not None and others:
            return math.inf  # judged by what the ranks do
        return states[rank].snapshot + rounds.cadence.quotas[rank] + rounds._overshoot.value
