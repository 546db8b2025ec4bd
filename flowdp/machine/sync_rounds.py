"""Rounds of one step of each rank (sync), and those of a single device."""

from __future__ import annotations

from typing import ClassVar

from flowdp.machine.epochs import EpochLedger
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.rounds import Shares
from flowdp.policy.ledger import Deal

__all__ = ["SingleRounds", "SyncRounds"]


class SyncRounds(PlannedRounds):
    """One step of each rank per round. Rounds that are short are armed together, and all are finished."""

    shares: ClassVar[Shares] = "equal"

    def _deal(self, ledger: EpochLedger) -> tuple[int, Deal]:
        ranks = self._present
        whole = ledger.whole_rounds(ranks)
        if whole:
            count = min(self.times.steps_at_once, whole, -(-self._room // len(ranks)))
            return count, ledger.deal_rounds(count, ranks)
        getting = frozenset(ranks)
        quotas = tuple(int(rank in getting) for rank in range(self.world_size))
        return 1, ledger.deal(quotas, [1.0] * self.world_size)


class SingleRounds(PlannedRounds):
    """Rounds of a single device: some steps each, and no mean, so that a round may end at any step."""

    shares: ClassVar[Shares] = "equal"
    may_hurry: ClassVar[bool] = True

    def _deal(self, ledger: EpochLedger) -> tuple[int, Deal]:
        return 1, ledger.deal((min(self.times.steps_at_once, self._room),), [1.0])
