"""The settings of a run that the coordinator needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowdp.options import CadenceOptions, OnFailure, Policy
from flowdp.policy.interval import Interval
from flowdp.policy.monitor import Monitor
from flowdp.protocol.position import Position

__all__ = ["BarrierPlan", "CoordinatorConfig", "GlobalBatch"]


@dataclass(frozen=True, slots=True)
class BarrierPlan:
    """Tasks of a run at its barriers.

    Attributes:
        save: When a checkpoint is due, beside requested ones and the last one of a run; None: it is never.
        evaluation: When an evaluation is due; None: there are none.
        monitor: Number that ends the run when it does not improve; None: none does.
        keeps_best: The state at the best epoch is saved.
        keep_best: Metric of the best checkpoints, if it is not known yet that there is one of this name.
        is_saved: The run resumes from a checkpoint in its own folder.
        inside: A run can go on inside an epoch, too: its last checkpoint may lie there.
    """

    save: Interval | None = None
    evaluation: Interval | None = None
    monitor: Monitor | None = None
    keeps_best: bool = False
    keep_best: Monitor | None = None
    is_saved: bool = False
    inside: bool = True

    @property
    def evaluates_epochs(self) -> bool:
        """Whether evaluations belong to epochs, and are judged with them."""
        return self.evaluation is not None and self.evaluation.unit == "epoch"

    @property
    def evaluates_steps(self) -> bool:
        """Whether evaluations are due at steps."""
        return self.evaluation is not None and self.evaluation.unit == "step"

    def evaluates(self, epoch: int) -> bool:
        """Whether an evaluation follows this epoch."""
        return self.evaluation is not None and self.evaluation.ends_with(epoch)

    def saves(self, epoch: int) -> bool:
        """Whether a checkpoint follows this epoch."""
        return self.save is not None and self.save.ends_with(epoch)

    def halts(self, epoch: int) -> bool:
        """Whether all ranks stand still behind this epoch."""
        return self.evaluates(epoch) or self.saves(epoch) or self.monitor is not None


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The batch of one step of all ranks (exact), which each rank has a part of.

    Attributes:
        size: Samples of it.
        samples: Samples of an epoch; its last global batch has the rest. None: each has as many as are read.
        least: Fewest samples of a rank's part, where it has any.
        forwards: Samples of a micro-batch of each rank, where all ranks make each forward together; None:
            each makes its own. Shape (world_size,).
        may_be_alone: One rank may train it alone where that takes less time, for all ranks lie in one memory.
    """

    size: int
    samples: int | None
    least: int = 1
    forwards: Sequence[int] | None = None
    may_be_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """The settings of a run that the coordinator needs.

    Attributes:
        world_size: Ranks.
        batches: Batches of an epoch, under exact global ones; None: not known before its end is read.
        epochs: Number of epochs; None: until `max_steps`.
        max_steps: Steps of all ranks after which the run ends; None: no limit.
        max_ms: Time from its first order after which the run is stopped, pauses included; None: no limit.
        policy: Averaging policy.
        cadence: Options of the cadence.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).
        wait_for_metric: A scheduler watches the loss of the epoch before.
        global_batch: Batch of one step of all ranks (exact); None elsewhere.
        groups: Batches that make one step of each rank; None: one each. With `max_steps` all are equal: how
            many steps an epoch has would depend on the speeds. Shape (world_size,).
        tasks: Checkpoints and evaluations, while all ranks stand still.
        on_failure: "continue": the other ranks go on where one fails, under sync and cadence.
        start: Position to resume at; None: the beginning.
        machines: Number of ranks of each machine; they sum to `world_size`, and ranks are numbered machine by
            machine. Empty: there is one.
        inner_rounds: Of so many rounds the last is one of all machines, those before it are each one's own
            (cadence); 1: every round is one of all. Without effect on one machine.
        overlaps: The mean of all machines travels while they train on: before each barrier task, a pause and
            the end of the run it is brought in (`Settle`).
    """

    world_size: int
    batches: int | None
    epochs: int | None = None
    max_steps: int | None = None
    max_ms: float | None = None
    policy: Policy = "cadence"
    cadence: CadenceOptions = field(default_factory=CadenceOptions)
    ratios: Sequence[float] | None = None
    wait_for_metric: bool = False
    global_batch: GlobalBatch | None = None
    groups: Sequence[int] | None = None
    tasks: BarrierPlan = field(default_factory=BarrierPlan)
    on_failure: OnFailure = "raise"
    start: Position | None = None
    machines: tuple[int, ...] = ()
    inner_rounds: int = 1
    overlaps: bool = False

    @property
    def machine_of(self) -> tuple[int, ...]:
        """Machine of each rank. Shape (world_size,)."""
        numbers = self.machines or (self.world_size,)
        return tuple(machine for machine, ranks in enumerate(numbers) for _ in range(ranks))
