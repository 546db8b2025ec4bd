"""State of an asynchronous round, and of a meeting of all ranks between two of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowdp.errors import ProtocolError
from flowdp.protocol.messages import Averaged, Outcome, SnapshotReady, SyncAck

__all__ = ["AsyncRound", "Meeting"]


@dataclass(slots=True)
class AsyncRound:
    """A round: snapshots are collected, averaged, applied.

    Attributes:
        number: Number of the round.
        deadline_ms: When it is given up, if a snapshot is missing then.
        snapshots: Those that have come.
        is_averaging: All have come, and are on their way into the mean.
        averaged: The mean.
        updated: Ranks that have applied it.
    """

    number: int
    deadline_ms: float
    snapshots: dict[int, SnapshotReady] = field(default_factory=dict)
    is_averaging: bool = False
    averaged: Averaged | None = None
    updated: set[int] = field(default_factory=set)

    def samples(self, world_size: int) -> tuple[int, ...]:
        """The weights of all snapshots. Shape (world_size,)."""
        return tuple(self.snapshots[rank].samples for rank in range(world_size))

    def missing(self, world_size: int) -> tuple[int, ...]:
        """Ranks whose snapshots have not come."""
        return tuple(rank for rank in range(world_size) if rank not in self.snapshots)


@dataclass(slots=True)
class Meeting:
    """A meeting of all ranks at the gate.

    Attributes:
        number: Its number among the rounds.
        is_hurried: Ranks are to come with the steps they have.
        acks: Acknowledgments so far, by rank.
    """

    number: int
    is_hurried: bool
    acks: dict[int, SyncAck] = field(default_factory=dict)

    def outcome(self) -> Outcome:
        """The outcome of the meeting.

        Raises:
            ProtocolError: Two ranks left it with different outcomes.
        """
        first = next(iter(self.acks.values())).outcome
        for rank, ack in self.acks.items():
            if ack.outcome != first:
                raise ProtocolError(
                    f"rank {rank} left round {first.round} with another outcome: {ack.outcome}"
                )
        return first
