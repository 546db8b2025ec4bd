"""The ledger of an epoch: its batches are dealt once and counted back once.

Batches are dealt in the order of the epoch, so the trained ones are a prefix of it, less a few batches that
a shortened round left behind: the position is one integer and that short list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heapreplace

from flowdp.errors import ProtocolError

__all__ = ["ENDLESS", "Deal", "Ledger", "ReadLedger", "interleave"]

ENDLESS = 2**62
"""Batches of an epoch whose end was not read yet."""

Deal = tuple[tuple[int, ...], ...]
"""Batch numbers per rank, in the order of training. Shape (ranks,)."""


def interleave(counts: Sequence[int], ms_per_step: Sequence[float], ahead: Sequence[int] = ()) -> list[int]:
    """The order in which ranks ask for their batches.

    Args:
        counts: Batches per rank. Shape (ranks,).
        ms_per_step: Time of one step per rank. Shape (ranks,).
        ahead: Batches that each rank trains first. Shape (ranks,); empty: none.

    Returns:
        Ranks, one for each batch; ties go to the lower rank.

    Example:
        >>> interleave((3, 1), (10.0, 25.0))
        [0, 1, 0, 0]
    """
    first = ahead or [0] * len(counts)
    asked = sorted(
        ((first[rank] + i) * ms_per_step[rank], rank, i)
        for rank, count in enumerate(counts)
        for i in range(count)
    )
    return [rank for _, rank, _ in asked]


class Ledger:
    """Batches of one epoch: dealt to a rank, trained, or remaining.

    Args:
        epoch: Epoch index, from 0.
        batches: Batches of the epoch; `ENDLESS` until its end is known.
        world_size: Ranks.
        groups: Batches that make one step of each rank; None: one each. Shape (world_size,).

    Attributes:
        groups: Batches that make one step of each rank; an epoch's last step may have fewer.
        position: First batch that was never dealt.
        left: Batches per rank that a shortened round left; they are the rank's first ones.
        dealt: Batches that are out.
        trained: Batches that were counted back as trained.
        is_ended: No batches will be added.
    """

    is_ended = True

    def __init__(
        self, epoch: int, batches: int, world_size: int, groups: Sequence[int] | None = None
    ) -> None:
        self.epoch = epoch
        self.batches = batches
        self.position = 0
        self.groups = (1,) * world_size if groups is None else tuple(groups)
        self.left: list[list[int]] = [[] for _ in range(world_size)]
        self.dealt = 0
        self.trained = 0

    @property
    def remaining(self) -> int:
        """Batches that can still be dealt."""
        # Asked for each fact, and left-overs lie with every rank: they are not counted.
        return self.batches - self.dealt - self.trained

    @property
    def is_complete(self) -> bool:
        """Whether every batch was trained."""
        return self.trained == self.batches

    def planned_steps(self, group: int) -> int:
        """Steps of the epoch, of so many batches each; about as many where ranks have steps of others."""
        return -(-self.batches // group)

    def whole_rounds(self, ranks: Collection[int]) -> int:
        """Rounds in which each of these ranks has a step; 0 where left-overs come first."""
        return 0 if any(self.left) else self.remaining // sum(self.groups[rank] for rank in ranks)

    def steps(self, rank: int, batches: Sequence[int]) -> int:
        """Steps of a rank that these batches make."""
        return -(-len(batches) // self.groups[rank])

    def deal(self, quotas: Sequence[int], ms_per_step: Sequence[float], due: Sequence[int] = ()) -> Deal:
        """Deal a round.

        A full round gives every rank its quota. Where less remains, the steps go one by one to the
        rank that would finish them first, and no rank gets more than its quota.

        Args:
            quotas: Most steps per rank. Shape (ranks,).
            ms_per_step: Time of one step per rank, only compared with each other. Shape (ranks,).
            due: Ranks that get a step of a short round before any other does.
        """
        wanted = [quota * group for quota, group in zip(quotas, self.groups, strict=True)]
        own = sum(min(len(hand), batches) for hand, batches in zip(self.left, wanted, strict=True))
        if self.batches - self.position < sum(wanted) - own:  # what lies with others changes hands
            return self._deal_tail(quotas, ms_per_step, due)
        hands = [self._take_left(rank, batches) for rank, batches in enumerate(wanted)]
        ahead = [self.steps(rank, hand) for rank, hand in enumerate(hands)]
        fresh = [quota - steps for quota, steps in zip(quotas, ahead, strict=True)]
        for rank in interleave(fresh, ms_per_step, ahead):
            hands[rank] += range(self.position, self.position + self.groups[rank])
            self.position += self.groups[rank]
        self.dealt += sum(map(len, hands))
        return tuple(map(tuple, hands))

    def deal_to(self, rank: int, steps: int) -> tuple[int, ...]:
        """Deal the next order of one rank: as `deal` with a quota for it alone, in time that no rank adds to.

        Args:
            rank: Rank index.
            steps: Most steps.
        """
        group = self.groups[rank]
        if self.batches - self.position + len(self.left[rank]) < steps * group:
            quotas = [0] * len(self.groups)
            quotas[rank] = steps
            return self._deal_tail(quotas, [1.0] * len(quotas), ())[rank]
        hand = self._take_left(rank, steps * group)
        stop = self.position + (steps - self.steps(rank, hand)) * group
        hand += range(self.position, stop)
        self.position = stop
        self.dealt += len(hand)
        return tuple(hand)

    def count_back(self, rank: int, batches: Sequence[int], steps: int) -> None:
        """Count back dealt batches: those of the first `steps` steps are trained, the others remain."""
        if not 0 <= steps <= self.steps(rank, batches) or len(batches) > self.dealt:
            raise ProtocolError(
                f"epoch {self.epoch}: rank {rank} says {steps} steps of {len(batches)} batches, "
                f"{self.dealt} batches are out"
            )
        trained = min(len(batches), steps * self.groups[rank])
        self.dealt -= len(batches)
        self.trained += trained
        self.left[rank] = sorted(self.left[rank] + list(batches[trained:]))

    def resume(self, position: int, left: Sequence[Sequence[int]]) -> None:
        """Begin where another run of the epoch stood; its left-overs go round the ranks of this one.

        Args:
            position: First batch that was never dealt.
            left: Earlier batches that were not trained. Shape (ranks of the other run, ...).
        """
        self.position = position
        self.trained = position - sum(map(len, left))
        for rank, hand in enumerate(left):
            self.left[rank % len(self.left)] += hand
        self.left = [sorted(hand) for hand in self.left]

    def reassign(self, rank: int, ranks: Sequence[int]) -> None:
        """Give the left-overs of a rank that is gone to other ranks."""
        gone, self.left[rank] = self.left[rank], []
        for at, other in enumerate(ranks):
            self.left[other] = sorted(self.left[other] + gone[at :: len(ranks)])

    def end(self, batches: int, _machine: int = 0) -> None:
        """Set the length of the epoch, once its end is read; batches dealt beyond it never existed."""
        if batches >= self.batches:
            return  # a limit ends it before
        beyond = max(0, self.position - batches)
        left = sum(map(len, self.left))
        self.left = [[batch for batch in hand if batch < batches] for hand in self.left]
        self.dealt -= beyond - (left - sum(map(len, self.left)))
        self.position -= beyond
        self.batches = batches

    def rewind(self) -> None:
        """Take back left-overs from the position: those right before it count as never dealt."""
        left = {batch for hand in self.left for batch in hand}
        while self.position - 1 in left:
            self.position -= 1
        self.left = [[batch for batch in hand if batch < self.position] for hand in self.left]

    def _take_left(self, rank: int, quota: int) -> list[int]:
        hand, self.left[rank] = self.left[rank][:quota], self.left[rank][quota:]
        return hand

    def _deal_tail(self, quotas: Sequence[int], ms_per_step: Sequence[float], due: Sequence[int]) -> Deal:
        most = sum(quota * group for quota, group in zip(quotas, self.groups, strict=True))
        pool = sorted(batch for hand in self.left for batch in hand)[:most]
        pool += range(self.position, min(self.batches, self.position + most - len(pool)))
        hands: list[list[int]] = [[] for _ in quotas]
        dealt = 0
        for rank in due:
            hands[rank] += pool[dealt : dealt + self.groups[rank]]
            dealt += len(hands[rank])
        finish = [
            (ms_per_step[rank] * (1 + bool(hands[rank])), rank) for rank, quota in enumerate(quotas) if quota
        ]
        heapify(finish)
        while dealt < len(pool):
            at, rank = finish[0]
            if len(hands[rank]) >= quotas[rank] * self.groups[rank]:
                heapreplace(finish, (float("inf"), rank))
                continue
            hands[rank] += pool[dealt : dealt + self.groups[rank]]
            dealt += self.groups[rank]
            heapreplace(finish, (at + ms_per_step[rank], rank))
        taken = set(pool)
        self.left = [[batch for batch in hand if batch not in taken] for hand in self.left]
        self.position = max(self.position, pool[-1] + 1) if pool else self.position
        self.dealt += len(pool)
        return tuple(map(tuple, hands))


class ReadLedger(Ledger):
    """A ledger of batches that can be dealt once they were read: exact cuts each by its samples.

    Args:
        epoch: Epoch index, from 0.
        limit: Most batches of the epoch; `ENDLESS`: no limit.
        world_size: Ranks.

    Attributes:
        samples: Samples of the batches that were read.
    """

    is_ended = False

    def __init__(self, epoch: int, limit: int, world_size: int) -> None:
        super().__init__(epoch, 0, world_size)
        self.samples: dict[int, int] = {}
        self._limit = limit

    @property
    def is_complete(self) -> bool:
        """Whether every batch was trained, and no other comes."""
        return self.is_ended and super().is_complete

    def planned_steps(self, group: int) -> int:
        """Steps of the epoch, as many as there may be until its end is known."""
        return super().planned_steps(group) if self.is_ended else self._limit

    def read(self, batch: int, samples: int) -> None:
        """Add a batch; they come in order, from the first on."""
        if batch < self._limit:
            self.samples[batch] = samples
            self.batches = max(self.batches, batch + 1)
            self.is_ended |= self.batches == self._limit

    def resume(self, position: int, left: Sequence[Sequence[int]]) -> None:
        """See `Ledger.resume`."""
        super().resume(position, left)
        self.batches = position

    def end(self, batches: int, _machine: int = 0) -> None:
        """Note that so many batches are all, or as many as the limit allows."""
        self.batches, self.is_ended = min(batches, self._limit), True
