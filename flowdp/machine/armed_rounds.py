"""Rounds that one order to every rank has armed, and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowdp.machine.rounds import outcome_of
from flowdp.policy.ledger import Deal
from flowdp.protocol.messages import DataEnded, Outcome, SampleRange, SyncAck, SyncPoints, Work

__all__ = ["ArmedRounds", "Dealt", "HeldRounds"]


@dataclass(slots=True)
class Dealt:
    """Batches that the ledger has dealt for one order to every rank.

    Attributes:
        rounds: Rounds that the order arms.
        hands: The batches.
        parts: Samples of each batch that are each rank's (exact). Shape (world_size, batches).
        alone: The rank that trains all of the batches (exact); None: all ranks train.
    """

    rounds: int
    hands: Deal
    parts: Sequence[tuple[SampleRange, ...]] = ()
    alone: int | None = None


@dataclass(slots=True)
class ArmedRounds:
    """One order, as every rank got it, until all present ranks have acknowledged it.

    Attributes:
        plan: Number of the plan.
        sync: `every` and `short` are those of rank 0; the other fields hold for all.
        epoch: Epoch of the batches.
        dealt: The batches.
        every: Steps of each rank in one of the rounds. Shape (world_size,).
        steps: Steps of all ranks in all of the rounds.
        predicted_ms: Expected duration; infinite while no speed is known.
        start_ms: Time of the beginning.
        acks: Acknowledgments so far, by rank.
    """

    plan: int
    sync: SyncPoints
    epoch: int
    dealt: Dealt
    every: tuple[int, ...]
    steps: int
    predicted_ms: float
    start_ms: float = math.nan
    acks: dict[int, SyncAck] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """Number of the last of them."""
        return self.sync.round + self.sync.count - 1

    @property
    def has_bad(self) -> bool:
        """Whether an acknowledgment reports a replica with NaN or inf parameters."""
        return any(ack.work.bad is not None for ack in self.acks.values())

    @property
    def end_step(self) -> int:
        """Global step behind all of them."""
        return self.sync.global_step + self.steps

    def is_acknowledged(self, present: Sequence[int]) -> bool:
        """Whether all present ranks have acknowledged it."""
        # The number first: each of many ranks acknowledges, and only the last one need look at all.
        return len(self.acks) >= len(present) and all(rank in self.acks for rank in present)

    def shorten(self, end: DataEnded) -> list[int]:
        """Drop the batches that the epoch does not have; returns the ranks that held some of them."""
        if self.epoch != end.epoch:
            return []
        whole = self.dealt.hands
        self.dealt.hands = tuple(tuple(filter(end.has, hand)) for hand in whole)
        return [rank for rank, hand in enumerate(whole) if hand != self.dealt.hands[rank]]

    def held(self, present: Sequence[int], unreported: Mapping[int, int]) -> HeldRounds:
        """Sum up the acknowledgments.

        Args:
            present: Ranks that are still there; all have acknowledged.
            unreported: Samples of ranks that are gone which means hold and no acknowledgment has reported.

        Raises:
            ProtocolError: Two ranks left the last round with different outcomes.
        """
        outcome = outcome_of({rank: self.acks[rank] for rank in present})
        works = [self._work(rank, outcome, unreported.get(rank, 0)) for rank in range(len(self.every))]
        return HeldRounds(self, outcome, works)

    def _work(self, rank: int, outcome: Outcome, unreported: int) -> Work:
        """Work of a rank as reported or, of a rank that is gone, as far as the means hold it.

        The times of a rank that is gone are lost with it.
        """
        if rank in self.acks:
            return self.acks[rank].work
        before = outcome.round - self.sync.round
        return Work(self.epoch, self.every[rank] * before + outcome.steps[rank], unreported)


@dataclass(frozen=True, slots=True)
class HeldRounds:
    """The rounds of one order that were held.

    Attributes:
        armed: The order, with the acknowledgments.
        outcome: Outcome of the last round held.
        works: Work of each rank in all of them. Shape (world_size,).
    """

    armed: ArmedRounds
    outcome: Outcome
    works: Sequence[Work]

    @property
    def rounds(self) -> int:
        """Number of rounds held."""
        return self.outcome.round - self.armed.sync.round + 1

    @property
    def sync_ms(self) -> float:
        """Averaging time of the last round."""
        return max(ack.sync_ms for ack in self.armed.acks.values())

    @property
    def inner_ms(self) -> float:
        """Averaging time of the rounds before the last one, all together."""
        return max(ack.work.sync_ms - ack.sync_ms for ack in self.armed.acks.values())

    @property
    def longest_ms(self) -> float:
        """Time of all rounds held: of the rank whose work, waits and averagings took longest."""
        return max(work.busy_ms + work.data_ms + work.wait_ms + work.sync_ms for work in self.works)

    @property
    def bad(self) -> dict[int, tuple[int, int] | None]:
        """Ranks with NaN or inf parameters -> (epoch, batch) of the first, if known."""
        told = {rank for rank, ack in self.armed.acks.items() if ack.work.bad is not None}
        return {rank: self.works[rank].bad for rank in sorted(told.union(self.outcome.bad))}

    @property
    def drifts(self) -> tuple[float, ...]:
        """Distances from the mean in the last round; empty where not measured."""
        # A mean of one replica is that replica: a distance of 0 would tell the guard that all is well.
        weights = self.outcome.weights
        givers = {rank for rank in self.outcome.members if weights[rank]}
        if len(givers.difference(self.bad)) < 2:
            return ()
        return tuple(ack.drift for ack in self.armed.acks.values() if ack.drift is not None)

    @property
    def norm(self) -> float | None:
        """2-norm of the averaged parameters in the last round; None where not measured."""
        return next((ack.norm for ack in self.armed.acks.values() if ack.norm is not None), None)

    @property
    def longest(self) -> Work:
        """Work of the rank with the most steps."""
        works = [ack.work for _, ack in sorted(self.armed.acks.items())]
        return max(works, key=lambda work: work.steps)
