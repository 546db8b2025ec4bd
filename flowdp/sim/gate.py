"""The gate on virtual time: the production decision, and the time that an averaging takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flowdp.errors import CollectiveAborted
from flowdp.machine.gate import GateState
from flowdp.protocol.messages import Arrival, Directives, Outcome
from flowdp.sim.clock import Clock
from flowdp.sim.shell import Shell

__all__ = ["Cluster", "VirtualGate"]


class Cluster(Protocol):
    """The ranks that meet at a gate."""

    clock: Clock
    ranks: Sequence[Shell]

    def say(self, text: str, *about: object) -> None:
        """Tell the trace of an event."""

    def crashes(self, number: int, where: str) -> bool:
        """Whether a rank fails now that it comes to such an act."""

    def held(self, outcome: Outcome, sync_ms: float) -> None:
        """A round was held, and its mean is in."""

    def released(self, number: int) -> None:
        """A rank has left the aborted gate without an outcome."""


class VirtualGate:
    """The gate of a virtual cluster; a meeting is complete only when all members stand in it.

    Args:
        cluster: The ranks.
        state: The machine that decides.
        sync_ms: Time of one averaging.
    """

    def __init__(self, cluster: Cluster, state: GateState, sync_ms: float) -> None:
        self._cluster = cluster
        self._state = state
        self._sync_ms = sync_ms

    @property
    def is_aborted(self) -> bool:
        """Whether no rank will meet here again."""
        return self._state.error is not None

    def direct(self, directives: Directives) -> None:
        """Replace the directives of the next outcome."""
        self._state.direct(directives)

    def enter(self, arrival: Arrival) -> None:
        """A rank comes in, and goes on when all have come and their mean is there."""
        cluster = self._cluster
        rank = cluster.ranks[arrival.rank]
        rank.state, rank.entered_ms = "gate", cluster.clock.now_ms
        cluster.say("rank {} enters the gate: {}", arrival.rank, arrival)
        try:
            outcome = self._state.enter(arrival)
        except CollectiveAborted:
            cluster.released(arrival.rank)
            return
        if outcome is not None:
            self._hold(outcome)

    def leave(self, number: int) -> None:
        """A rank takes no part any more."""
        outcome = self._state.leave(number)
        if outcome is not None:
            self._hold(outcome)

    def abort(self, reason: str) -> None:
        """Release all ranks, for good."""
        self._state.abort(reason)
        for number, rank in enumerate(self._cluster.ranks):
            if rank.state == "gate":
                self._cluster.clock.after(0.0, self._cluster.released, number)

    def _hold(self, outcome: Outcome) -> None:
        cluster = self._cluster
        cluster.say("gate: {}", outcome)
        for member in outcome.members:
            rank = cluster.ranks[member]
            rank.wait_ms += cluster.clock.now_ms - rank.entered_ms
        for member in outcome.members:
            if cluster.crashes(member, "mean"):
                # Its part of the mean is missing: the round is an error for all.
                self.abort(f"rank {member} failed in round {outcome.round}")
                return
        sync_ms = self._sync_ms if len(outcome.members) > 1 else 0.0
        cluster.clock.after(sync_ms, self._end, outcome, sync_ms)

    def _end(self, outcome: Outcome, sync_ms: float) -> None:
        if not self.is_aborted:
            self._cluster.held(outcome, sync_ms)
