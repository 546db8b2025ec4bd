"""The ranks that share a step (exact): all, all but those that would hold it up, or one alone.

Sharing a step costs a meeting, and on the CPU the ranks share one interpreter and one memory. A trial tells
how much (`Sharing`): an order is held the other way, and the faster way is kept. Trials become rare, so those
of a long step cost nothing that can be measured.

A step has a time that does not depend on its samples. Where that alone takes a slow rank longer than the
others need for their parts, it holds them up even with the smallest part there is (`Exclusion`). Shares by
speed cannot tell: a rank that can be balanced is worth its part, however slow it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from flowdp.policy.recovery import Probes

__all__ = ["Exclusion", "Sharing"]

GAIN = 0.95
"""The other way replaces the present one where it takes at most this part of its time."""

FIRST_TRIAL, LAST_TRIAL = 2, 256
"""Orders between two trials: so many at first, twice as many after each that has changed nothing, at most.
Few at first, for a trial that was disturbed, by the file of a checkpoint, has told nothing."""

SMOOTHING = 0.3


class Sharing:
    """Chooses between steps that all ranks share and steps of one rank alone, by their measured time.

    Attributes:
        is_shared: The present way; steps are shared at first.

    Threads: no locks; one owner.
    """

    def __init__(self) -> None:
        self.is_shared = True
        self._ms = 0.0  # of a step, the present way
        self._is_trying = False  # an order of the other way is out
        self._distance = FIRST_TRIAL
        self._orders = 0  # until the next trial

    def plan(self) -> bool:
        """Whether the next order is a trial of the other way."""
        if self._is_trying or not self._ms or self._orders > 0:
            return False
        self._is_trying = True
        return True

    def measured(self, shared: bool, ms: float) -> None:
        """Take in the time of a step of an order that was held.

        Args:
            shared: Whether all ranks shared its steps.
            ms: Milliseconds.
        """
        if shared == self.is_shared:
            self._ms = SMOOTHING * ms + (1.0 - SMOOTHING) * self._ms if self._ms else ms
            self._orders -= 1
            return
        self._is_trying = False
        if ms <= GAIN * self._ms:
            self.is_shared, self._ms, self._distance = shared, ms, FIRST_TRIAL
        else:
            self._distance = min(2 * self._distance, LAST_TRIAL)
        self._orders = self._distance

    def dropped(self) -> None:
        """Forget the orders that are out: they are planned anew."""
        self._is_trying = False


LONGER = 1.1
"""A rank is left out that takes so many times as long for the smallest part as the others without it."""

CONFIRMATIONS = 3
"""Orders in a row in which it does."""


class Exclusion:
    """Chooses the ranks that have no part of the steps.

    A rank that is left out gets the smallest part in an order now and then (`Probes`), and has a part for
    good when it holds nobody up there.

    Args:
        world_size: Ranks.

    Attributes:
        out: Ranks that are left out, never all.

    Threads: no locks; one owner.
    """

    def __init__(self, world_size: int) -> None:
        self.out: frozenset[int] = frozenset()
        self._late = [0] * world_size  # orders in a row in which a rank was too slow
        self._probes = Probes(world_size)
        self._is_asking = False  # an order with a probe is out

    def plan(self) -> frozenset[int]:
        """Ranks without a part in the next order: those that are left out, or fewer in a probe."""
        asked = frozenset[int]() if self._is_asking else self.out.intersection(self._probes.due)
        self._is_asking |= bool(asked)
        return self.out - asked

    def measured(self, samples: Sequence[int], ms: Sequence[float], smallest: int) -> None:
        """Take in an order that was held.

        Args:
            samples: Samples of each rank. Shape (ranks,).
            ms: Time of each rank for them. Shape (ranks,).
            smallest: Samples of a rank with the smallest parts.
        """
        taking = [rank for rank, count in enumerate(samples) if count and rank not in self.out]
        if not taking:
            return
        longest_ms = max(ms[rank] for rank in taking)
        self._is_asking &= not any(samples[rank] for rank in self.out)
        self._probes.held([int(rank not in self.out or count > 0) for rank, count in enumerate(samples)])
        self.out -= {rank for rank in self.out if samples[rank] and ms[rank] <= longest_ms}
        late = self._too_slow(taking, samples, ms, smallest)
        self._late = [count + 1 if rank in late else 0 for rank, count in enumerate(self._late)]
        self.out |= {rank for rank in late if self._late[rank] >= CONFIRMATIONS}

    def dropped(self) -> None:
        """Forget the probe that is out: it was not held, or tells nothing."""
        self._is_asking = False

    @staticmethod
    def _too_slow(
        taking: Sequence[int], samples: Sequence[int], ms: Sequence[float], smallest: int
    ) -> frozenset[int]:
        """The slowest ranks, as many as the others would be faster without."""
        slowest_first = sorted(taking, key=lambda rank: -ms[rank])
        whole = left = sum(samples[rank] for rank in taking)
        found = 0
        for at, (rank, following) in enumerate(pairwise(slowest_first), start=1):
            if samples[rank] > smallest:
                break  # it can have a smaller part
            left -= samples[rank]
            if ms[rank] > LONGER * ms[following] * whole / left:  # they have its samples, too
                found = at
        return frozenset(slowest_first[:found])
