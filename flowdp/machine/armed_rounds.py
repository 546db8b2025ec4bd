"""Rounds that were armed by one order to every rank, until all who are there have acknowledged them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowdp.errors import ProtocolError
from flowdp.policy.ledger import Deal
from flowdp.protocol.messages import DataEnded, Outcome, SyncAck, SyncNow, Work

__all__ = ["Block"]


@dataclass(slots=True)
class Block:
    """One order, as every rank got it.

    Attributes:
        plan: Number of the plan.
        sync: `every` is that of rank 0; the other fields hold for all.
        epoch: Epoch of the batches.
        deal: The batches.
        every: Steps of each rank in one of the rounds. Shape (world_size,).
        predicted_ms: When it should be over; infinite where nobody knows.
        start_ms: When it began.
        acks: What the ranks have answered.
    """

    plan: int
    sync: SyncNow
    epoch: int
    deal: Deal
    every: tuple[int, ...]
    predicted_ms: float
    start_ms: float = math.nan
    acks: dict[int, SyncAck] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """Number of the last of them."""
        return self.sync.round + self.sync.count - 1

    def shorten(self, end: DataEnded) -> list[int]:
        """Drop what the epoch does not have; returns the ranks that held some of that."""
        if self.epoch != end.epoch:
            return []
        whole = self.deal
        self.deal = tuple(tuple(batch for batch in hand if batch < end.batches) for hand in whole)
        return [rank for rank, hand in enumerate(whole) if hand != self.deal[rank]]

    @property
    def late(self) -> list[int]:
        """Ranks that were left out of the last round's mean, as their devices alone knew."""
        return [rank for rank, ack in sorted(self.acks.items()) if ack.bad]

    def outcome(self, present: Sequence[int]) -> Outcome:
        """Of the last round held.

        Args:
            present: Who has acknowledged it.

        Raises:
            ProtocolError: Two of them left it with different ones.
        """
        outcome = self.acks[present[0]].outcome
        for rank in present:
            if self.acks[rank].outcome != outcome:
                raise ProtocolError(
                    f"rank {rank} left round {outcome.round} with another outcome: {self.acks[rank].outcome}"
                )
        return outcome

    def work(self, rank: int, outcome: Outcome, untold: int) -> Work:
        """What a rank has done: what it said, or, where it is gone, what the means hold of it.

        Args:
            rank: Who.
            outcome: Of the last round held.
            untold: What it said of its samples when it went.

        How long it took, it alone knew.
        """
        if rank in self.acks:
            return self.acks[rank].work
        before = outcome.round - self.sync.round
        return Work(self.epoch, self.every[rank] * before + outcome.steps[rank], untold)
