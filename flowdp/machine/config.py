"""The settings of a run that the coordinator needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowdp.machine.barrier_tasks import BarrierPlan
from flowdp.options import CadenceOptions, OnFailure, Policy
from flowdp.protocol.position import Position

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the coordinator has to know of a run.

    Attributes:
        world_size: Ranks.
        batches: Batches of an epoch, in exact windows; None: not known before its end was read, which exact
            cannot have.
        epochs: How many; None: until `max_steps`.
        max_steps: Steps of all ranks after which the run ends; None: no limit.
        policy: Who waits for whom.
        cadence: How often.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).
        wait_for_metric: A scheduler watches the loss of the epoch before.
        window: Samples that make one step of the run (exact).
        samples: Samples of an epoch (exact): its last window has what remains.
        least: Samples of a rank's part of a window (exact), where it has any.
        forwards: Samples of a micro-batch of each rank, where all ranks make each forward together (exact).
        groups: Batches that make one step of each rank; None: one each. With `max_steps` all are equal: how
            many steps an epoch has would depend on the speeds. Shape (world_size,).
        tasks: What is done while all ranks stand still.
        on_failure: Whether the others go on where one rank fails ("continue": in sync and cadence).
        start: Where the run begins; None: at its beginning.
    """

    world_size: int
    batches: int | None
    epochs: int | None = None
    max_steps: int | None = None
    policy: Policy = "cadence"
    cadence: CadenceOptions = field(default_factory=CadenceOptions)
    ratios: Sequence[float] | None = None
    wait_for_metric: bool = False
    window: int | None = None
    samples: int | None = None
    least: int = 1
    forwards: Sequence[int] | None = None
    groups: Sequence[int] | None = None
    tasks: BarrierPlan = field(default_factory=BarrierPlan)
    on_failure: OnFailure = "raise"
    start: Position | None = None
