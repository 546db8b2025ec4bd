"""Scenarios: the shape of a run, and what goes wrong in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from flowdp.machine.barrier_tasks import BarrierPlan
from flowdp.machine.config import RunConfig
from flowdp.protocol.messages import Requested

__all__ = ["LATENCY_MS", "STALL", "Crash", "Disturbance", "Scenario", "Wish"]

STALL = 20.0
"""A stalled step takes this many times its time."""

LATENCY_MS = 8000.0
"""Longest delay of a late snapshot."""


@dataclass(frozen=True)
class Crash:
    """A rank fails: before its first order, in a step, on its way to the gate, in the averaging, in a task.

    Attributes:
        rank: Who.
        where: At which kind of action.
        after: How many such actions succeed before.
    """

    rank: int
    where: Literal["start", "step", "enter", "mean", "snapshot", "apply", "evaluate", "capture"]
    after: int

    @property
    def is_alone(self) -> bool:
        """Whether no mean and no barrier task of the others depends on it."""
        return self.where in ("start", "step", "enter")


@dataclass(frozen=True)
class Wish:
    """The user asks for something at a time."""

    at_ms: float
    request: Requested


@dataclass(frozen=True)
class Disturbance:
    """A rank is slow for a while: a hiccup of one step, or a phase.

    Attributes:
        rank: The slow rank.
        step: The step of its that is the first slow one.
        factor: How many times slower it is.
        for_ms: Steps begun within this time of the first one are slow, too; 0: that one alone is.
    """

    rank: int
    step: int
    factor: float
    for_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run of the virtual cluster.

    Attributes:
        seed: Of the random numbers drawn while it runs.
        config: What the coordinator is told.
        ms_per_step: Mean time of one step per rank. Shape (world_size,).
        noise: Relative spread of a step's time.
        sync_ms: Time of one averaging.
        batch_size: Samples of a batch; in exact, what a rank trains in its time of a step.
        last_batch: Samples of an epoch's last batch; in exact the window and the samples of an epoch say it.
        lengths: Batches of the epochs, in turn, where `config` does not know them.
        read_ms: Time that reading one of those batches takes.
        ahead: How many of them are read and not taken, at most, while nobody waits.
        latency_ms: Longest time that a message takes.
        stall: Probability that a step takes `STALL` times its time.
        late_snapshot: Probability that a snapshot takes up to `LATENCY_MS` longer.
        lost_snapshot: Probability that it never comes.
        slow_from: (rank, step, factor): from that step of its on, the rank is slower by that factor.
        disturbance: A rank that is slow for a while; None: none is.
        crashes: Ranks that fail.
        wishes: What the user does, in order of time.
        differs: (rank, epoch): from the end of that epoch on, the rank's replica is not that of the others.
        bad_steps: (rank, step): in that step of its, the rank's replica leaves the numbers.
        late_verdicts: Devices leave such a replica out of the mean, and their hosts hear of it one round late
            (sync and cadence).
        eval_batches: Batches of an evaluation.
        eval_ms: Mean time of one of them.
        capture_ms: Longest time that it takes a rank to put down what a checkpoint keeps of it.
        later: The run that begins where this one was saved; None: none does.
        begins_at: Which of the saved positions of the run before this one begins at, as a fraction of them.
    """

    seed: int
    config: RunConfig
    ms_per_step: tuple[float, ...]
    noise: float = 0.0
    sync_ms: float = 1.0
    batch_size: int = 8
    last_batch: int = 8
    lengths: tuple[int, ...] = ()
    read_ms: float = 0.0
    ahead: int = 4
    latency_ms: float = 0.1
    stall: float = 0.0
    late_snapshot: float = 0.0
    lost_snapshot: float = 0.0
    slow_from: tuple[int, int, float] | None = None
    disturbance: Disturbance | None = None
    crashes: tuple[Crash, ...] = ()
    wishes: tuple[Wish, ...] = field(default=())
    differs: tuple[int, int] | None = None
    bad_steps: tuple[tuple[int, int], ...] = ()
    late_verdicts: bool = False
    eval_batches: int = 1
    eval_ms: float = 1.0
    capture_ms: float = 1.0
    later: Scenario | None = None
    begins_at: float = 1.0

    def length(self, epoch: int) -> int:
        """Batches of an epoch."""
        known = self.config.batches
        return self.lengths[epoch % len(self.lengths)] if known is None else known

    def dealt(self, epoch: int) -> int:
        """Batches of an epoch that the run comes to, or that the one before it had come to."""
        start = self.config.start
        first, before = (0, 0) if start is None else (start.done, start.planned)
        if self.config.max_steps is None or epoch < first:
            return self.length(epoch)
        group = max(self.config.groups or (1,))
        before += sum(-(-self.length(earlier) // group) for earlier in range(first, epoch))
        dealt = [one.position for one in (() if start is None else start.open) if one.epoch == epoch]
        return max(0, *dealt, min(self.length(epoch), (self.config.max_steps - before) * group))

    def samples_in(self, epoch: int, batch: int) -> int:
        """Samples of a batch."""
        window, samples = self.config.window, self.config.samples
        if window is not None and samples is not None:
            return min(window, samples - batch * window)
        return self.last_batch if batch == self.length(epoch) - 1 else self.batch_size

    def step_ms(self, rank: int, samples: int) -> float:
        """Mean time of a step."""
        ms = self.ms_per_step[rank]
        return ms if self.config.window is None else ms * samples / self.batch_size

    @property
    def longest_step_ms(self) -> float:
        """No step takes longer than this."""
        slowed = self.slow_from[2] if self.slow_from else 1.0
        slowed = max(slowed, self.disturbance.factor if self.disturbance else 1.0)
        whole = max(self.step_ms(rank, self.config.window or 0) for rank in range(len(self.ms_per_step)))
        return whole * (1 + self.noise) * slowed * (STALL if self.stall else 1.0)

    @property
    def is_steady(self) -> bool:
        """Whether all ranks are as fast as ever, and rounds as long as the cadence wants them."""
        config = self.config
        changes = (self.noise, self.stall, self.slow_from, self.disturbance, self.crashes, config.start)
        limits = (config.ratios, config.cadence.max_batch_diff is not None)
        return config.policy == "cadence" and config.batches is not None and not any((*changes, *limits))

    @property
    def stands(self) -> bool:
        """Whether all ranks may stand still for some barrier task."""
        is_wanted = any(wish.request.what in ("checkpoint", "snapshot") for wish in self.wishes)
        return is_wanted or self.config.tasks != BarrierPlan() or bool(self.bad_steps)

    @property
    def standstills(self) -> int:
        """There are no more of them."""
        epochs, save = self.config.epochs or 1, self.config.tasks.save
        steps = sum(self.length(epoch) for epoch in range(epochs))
        # After a checkpoint a round is held before the next one is due, whatever the clock says.
        saves = (
            0 if save is None or save.unit == "epoch" else steps / (save.every if save.unit == "step" else 1)
        )
        return 2 * epochs + len(self.wishes) + len(self.bad_steps) + math.ceil(saves) + 2

    @property
    def standstill_ms(self) -> float:
        """No standstill takes longer than this: a heal, two evaluations, two captures."""
        evaluation_ms = (self.eval_batches + 1) * 1.5 * self.eval_ms
        return 2 * evaluation_ms + 2 * self.capture_ms + self.sync_ms + 12 * self.latency_ms

    @cached_property
    def most_rounds(self) -> int:
        """No run holds more of them."""
        steps = sum(self.length(epoch) for epoch in range(self.config.epochs or 1))
        return 100 + 10 * (steps + self.standstills)

    @cached_property
    def longest_run_ms(self) -> float:
        """No run that ends by itself takes longer than this."""
        steps = sum(self.length(epoch) for epoch in range(self.config.epochs or 1))
        per_step = self.longest_step_ms + self.sync_ms + 6 * self.latency_ms + self.read_ms
        last_wish_ms = max((wish.at_ms for wish in self.wishes), default=0.0)
        lateness_ms = (steps * 4 + 20) * (self.lost_snapshot + self.late_snapshot) * LATENCY_MS * 8
        trained_ms = 4 * steps * per_step + self.standstills * self.standstill_ms
        return 100 + trained_ms + len(self.wishes) * (last_wish_ms + 1) + lateness_ms
