"""Bounds of a run: how long it may take, and how often its ranks may stand still."""

from __future__ import annotations

import math
from functools import cached_property

from flowdp.machine.config import BarrierPlan
from tests.simulator.scenario import LATENCY_MS, STALL, Scenario

__all__ = ["Bounds"]


class Bounds:
    """Limits that a run of a scenario must keep.

    Args:
        scenario: The run.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._run = scenario

    @property
    def longest_step_ms(self) -> float:
        """No step takes longer than this."""
        slowed = self._run.slow_from[2] if self._run.slow_from else 1.0
        slowed = max(slowed, self._run.disturbance.factor if self._run.disturbance else 1.0)
        batch = self._run.config.global_batch
        samples = 0 if batch is None else batch.size
        whole = max(self._run.step_ms(rank, samples) for rank in range(len(self._run.ms_per_step)))
        return whole * (1 + self._run.noise) * slowed * (STALL if self._run.stall else 1.0)

    @property
    def is_steady(self) -> bool:
        """Whether all ranks are as fast as ever, and rounds as long as the cadence wants them."""
        config = self._run.config
        changes = (
            self._run.noise,
            self._run.stall,
            self._run.slow_from,
            self._run.disturbance,
            self._run.crashes,
            config.start,
        )
        limits = (config.ratios, config.cadence.max_batch_diff is not None)
        return config.policy == "cadence" and config.batches is not None and not any((*changes, *limits))

    @property
    def stands(self) -> bool:
        """Whether all ranks may stand still for some barrier task."""
        is_wanted = any(wish.request.what in ("checkpoint", "snapshot") for wish in self._run.wishes)
        return is_wanted or self._run.config.tasks != BarrierPlan() or bool(self._run.bad_steps)

    @property
    def standstills(self) -> int:
        """There are no more of them."""
        epochs, save = self._run.config.epochs or 1, self._run.config.tasks.save
        steps = sum(self._run.length(epoch) for epoch in range(epochs))
        # After a checkpoint a round is held before the next one is due, whatever the clock says.
        saves = (
            0 if save is None or save.unit == "epoch" else steps / (save.every if save.unit == "step" else 1)
        )
        return 2 * epochs + len(self._run.wishes) + len(self._run.bad_steps) + math.ceil(saves) + 2

    @property
    def standstill_ms(self) -> float:
        """No standstill takes longer than this: a heal, two evaluations, two captures."""
        evaluation_ms = (self._run.eval_batches + 1) * 1.5 * self._run.eval_ms
        heals_ms = self._run.sync_ms * (1 + len(self._run.config.machines)) + self._run.pass_ms
        ways = 12 + 4 * len(self._run.config.machines)
        return 2 * evaluation_ms + 2 * self._run.capture_ms + heals_ms + ways * self._run.way_ms

    @cached_property
    def most_rounds(self) -> int:
        """No run holds more of them."""
        steps = sum(self._run.length(epoch) for epoch in range(self._run.config.epochs or 1))
        return 100 + 10 * (steps + self.standstills) * self._run.config.inner_rounds

    @cached_property
    def longest_run_ms(self) -> float:
        """No run that ends by itself takes longer than this."""
        steps = sum(self._run.length(epoch) for epoch in range(self._run.config.epochs or 1))
        averaging_ms = self._run.sync_ms + self._run.pass_ms
        per_step = self.longest_step_ms + averaging_ms + 6 * self._run.way_ms + self._run.read_ms
        last_wish_ms = max((wish.at_ms for wish in self._run.wishes), default=0.0)
        lateness_ms = (steps * 4 + 20) * self._run.late_snapshot * LATENCY_MS * 8
        trained_ms = 4 * steps * per_step + self.standstills * self.standstill_ms
        trained_ms += 0.0 if self._run.loss is None else self._run.loss.detect_ms
        return 100 + trained_ms + len(self._run.wishes) * (last_wish_ms + 1) + lateness_ms
