"""The gate on virtual time: the production decision, and the time that an averaging takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowdp.errors import CollectiveAborted
from flowdp.machine.gate import GateState
from flowdp.machine.worker import Leave
from flowdp.protocol.messages import Arrival, Directives, Outcome, SyncAck

if TYPE_CHECKING:
    from flowdp.sim.world import World

__all__ = ["VirtualGate"]

ABORTED = 2**62
"""The gate's hurry after an abort."""


class VirtualGate:
    """Where the ranks of a world meet; a meeting is complete only when all members stand in it.

    Args:
        world: Whose ranks.
        state: The machine that decides.

    Attributes:
        hurry: Rounds up to this number are entered with the steps there are.
    """

    def __init__(self, world: World, state: GateState) -> None:
        self.hurry = -1
        self._world = world
        self._state = state

    @property
    def is_aborted(self) -> bool:
        """Whether no rank will meet here again."""
        return self._state.error is not None

    def direct(self, directives: Directives) -> None:
        """Replace what the next outcome will say."""
        self._state.direct(directives)

    def enter(self, arrival: Arrival) -> None:
        """A rank comes in, and goes on when all have come and their mean is there."""
        rank = self._world.ranks[arrival.rank]
        rank.state = "gate"
        rank.entered_ms = self._world.clock.now_ms
        self._world.say("rank {} enters the gate: {}", arrival.rank, arrival)
        try:
            outcome = self._state.enter(arrival)
        except CollectiveAborted:
            self._released(arrival.rank)
            return
        if outcome is not None:
            self._hold(outcome)

    def leave(self, number: int) -> None:
        """A rank takes no part any more."""
        outcome = self._state.leave(number)
        if outcome is not None:
            self._hold(outcome)

    def abort(self, reason: str) -> None:
        """Release everybody, for good."""
        self._state.abort(reason)
        self.hurry = ABORTED
        for number, rank in enumerate(self._world.ranks):
            if rank.state == "gate":
                self._world.clock.after(0.0, self._released, number)

    def _hold(self, outcome: Outcome) -> None:
        world = self._world
        world.say("gate: {}", outcome)
        for member in outcome.members:
            world.ranks[member].wait_ms += world.clock.now_ms - world.ranks[member].entered_ms
        for member in outcome.members:
            if world.crashes(member, "mean"):
                # Its part of the mean is missing: the round is an error for all.
                self.abort(f"rank {member} failed in round {outcome.round}")
                return
        world.clock.after(self._sync_ms(outcome), self._held, outcome)

    def _held(self, outcome: Outcome) -> None:
        if self.is_aborted:
            return
        world = self._world
        for member in outcome.members:
            world.rules.met(member, outcome)
        for member in outcome.members:
            rank = world.ranks[member]
            rank.state = "idle"
            done = rank.machine.met(outcome)
            rank.met()
            if world.source is not None:
                world.source.settle(member)
            if done is not None:
                bits = self._bits(member, done.epoch) if outcome.compare else None
                is_bad = rank.unread is not None
                rank.read()
                work, sync_ms = rank.work(done), self._sync_ms(outcome)
                ack = SyncAck(
                    member, outcome, work, sync_ms, rank.wait_ms, 0.001, bits, norm=None, bad=is_bad
                )
                rank.wait_ms = 0.0
                world.fact(ack, ("up", member))
            world.clock.after(0.0, world.resume, member, "idle")

    def _released(self, number: int) -> None:
        """The gate was aborted: wait for the order to leave."""
        world = self._world
        rank = world.ranks[number]
        if rank.state == "gone":
            return
        rank.state = "released"
        rank.wake(world.clock.now_ms)
        if isinstance(rank.machine.next(-1), Leave):
            world.leave(number, None)
        else:
            # The order is on its way: look again when it has come.
            world.clock.after(world.scenario.latency_ms + 0.01, self._released, number)

    def _sync_ms(self, outcome: Outcome) -> float:
        return self._world.scenario.sync_ms if len(outcome.members) > 1 else 0.0

    def _bits(self, number: int, epoch: int) -> int:
        differs = self._world.scenario.differs
        return int(differs is not None and differs[0] == number and epoch >= differs[1])
