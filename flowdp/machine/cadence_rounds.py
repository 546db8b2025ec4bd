"""Rounds of several steps, as many of each rank as its speed allows (cadence)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from flowdp.machine.armed_rounds import ArmedRounds, Dealt, HeldRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import EpochLedger, Epochs
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.rounds import Shares
from flowdp.policy.cadence import Cadence
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import StartEpoch

__all__ = ["CadenceRounds"]

DRIFT_EVERY = 4
"""Where averaging takes more than `DRIFT_SHARE` of a round, the drift is measured in every fourth round."""

DRIFT_SHARE = 0.02


class CadenceRounds(PlannedRounds):
    """Rounds with a quota of steps for each rank, so that all ranks arrive at the same time.

    On several machines an order has several rounds, of which only the last is one of all machines.

    Args:
        config: The run.
        epochs: Ledgers and tallies.
    """

    shares: ClassVar[Shares] = "steps"
    may_hurry: ClassVar[bool] = True
    cadence: Cadence

    def __init__(self, config: CoordinatorConfig, epochs: Epochs) -> None:
        super().__init__(config, epochs)
        self.cadence = Cadence(config.world_size, config.cadence, config.ratios)
        self._inner_rounds = config.inner_rounds if len(config.machines) > 1 else 1

    @property
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""
        return self.cadence.el_che.ms_per_batch if self.cadence.el_che.is_calibrated else super().pace_ms

    def leave(self, rank: int, unreported_samples: int, now_ms: float) -> list[Command]:
        """Go on without a rank that has failed; see `PlannedRounds.leave`."""
        self.cadence.leave(rank)
        return super().leave(rank, unreported_samples, now_ms)

    def _deal(self, ledger: EpochLedger) -> Dealt:
        quotas, cadence = self.cadence.quotas, self.cadence
        count = self._rounds_at_once(ledger, quotas)
        if count > 1:
            quotas = tuple(count * quota for quota in quotas)
        return Dealt(count, ledger.deal(quotas, cadence.ms_per_step, cadence.due))

    def _order(self, armed: ArmedRounds, rank: int) -> StartEpoch:
        order, pace_ms = super()._order(armed, rank), self._predicted_pace_ms
        if not pace_ms:
            return order
        slack_ms = armed.predicted_ms - order.steps * pace_ms[rank]
        return replace(order, slack_ms=slack_ms, guarded=self.cadence.is_guarded)

    def _rounds_at_once(self, ledger: EpochLedger, quotas: Sequence[int]) -> int:
        """Rounds of the next order: as many as a mean of all machines is apart, or as the epoch's rest makes.

        No round begins behind a limit, and before the speeds are known one round measures them. The rest of
        an epoch is one order, for each ends with a mean of all machines: its rounds may be shorter.
        """
        if self._inner_rounds == 1 or not self._is_paced:
            return 1
        batches = sum(quota * group for quota, group in zip(quotas, ledger.groups, strict=True))
        count = min(self._inner_rounds, -(-ledger.remaining // batches))
        if self.limit is not None:
            count = min(count, -(-self._room // sum(quotas)))
        return count

    @property
    def _is_paced(self) -> bool:
        return self.cadence.is_known

    @property
    def _predicted_pace_ms(self) -> Sequence[float]:
        if not self.cadence.el_che.is_calibrated:
            return ()
        measured = self.cadence.el_che.ms_per_batch
        slowest = max(measured)
        return [ms or slowest for ms in measured]

    @property
    def _wants_drift(self) -> bool:
        is_cheap = self.times.sync_ms <= DRIFT_SHARE * self.cadence.round_ms * self._inner_rounds
        return is_cheap or self.next_round // self._inner_rounds % DRIFT_EVERY == 0

    @property
    def _weights(self) -> Sequence[float]:
        return self.cadence.quotas if self.cadence.el_che.is_calibrated else ()

    def _measure(self, held: HeldRounds) -> str:
        super()._measure(held)
        present = frozenset(self._present)
        paces = [work.pace_ms if rank in present else 0.0 for rank, work in enumerate(held.works)]
        steps = [work.steps for work in held.works]
        # Of a round: its part of the mean of all machines, which an epoch's end brings after fewer rounds.
        sync_ms = held.sync_ms / self._inner_rounds
        if held.armed.sync.inner:
            sync_ms += held.inner_ms / held.rounds
        return self.cadence.measured(paces, steps, sync_ms, held.drifts or None, held.rounds)
