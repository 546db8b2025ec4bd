"""Commands of the coordinator's machine to its shell: frozen records, no tensors.

Durations are milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowdp.policy.formats import format_duration, format_epochs, format_metric
from flowdp.policy.interval import SHARE, Interval, SaveCost
from flowdp.policy.tally import EpochMetrics, MetricArray
from flowdp.protocol.messages import Directives, Order
from flowdp.protocol.position import Position

__all__ = [
    "AbortGate",
    "Average",
    "Command",
    "CutEvaluation",
    "Directives",
    "EpochMetrics",
    "EpochStarted",
    "EvaluationEnded",
    "Fail",
    "Finish",
    "LeaveGate",
    "Paused",
    "Quarantined",
    "RoundEnded",
    "Save",
    "SavesPutOff",
    "Send",
]


@dataclass(frozen=True, slots=True)
class Send:
    """Put this order into the inbox of that rank."""

    rank: int
    order: Order


@dataclass(frozen=True, slots=True)
class AbortGate:
    """Release all ranks in the gate with an error."""

    reason: str


@dataclass(frozen=True, slots=True)
class Average:
    """Average the snapshots of a round on the helper thread (async).

    Attributes:
        round: The round.
        samples: Weight per rank. Shape (world_size,).
    """

    round: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Record of a round, or of the rounds of one order together.

    Attributes:
        round: Number of the last of them.
        rounds: How many.
        epoch: The epoch towards which they count: that of their batches or, where its record came before a
            mean was there (async), the next one.
        global_step: Steps of all ranks after them.
        steps: Steps per rank. Shape (world_size,).
        samples: Samples per rank. Shape (world_size,).
        loss: Mean over the samples; None without any.
        lr: Learning rate of the first group.
        wall_ms: From their beginning to their end.
        busy_ms: Time in steps per rank. Shape (world_size,).
        data_ms: Waiting for batches per rank. Shape (world_size,).
        wait_ms: Waiting in the gate per rank. Shape (world_size,).
        sync_ms: Averaging time of a round, the mean of them.
        anchor: Steps of the slowest rank that the cadence aimed at.
        drift: Largest over the ranks; None where not measured.
        reason: Reason of the guard or the gate; "" for an ordinary round.
        grad_norm: Mean over the steps of the 2-norm of the gradients before they were clipped; None without
            `max_grad_norm`.
        grad_norm_max: The largest of them.
        param_norm: 2-norm of the averaged parameters; None where the drift is not measured.
        share: Fractions of the work in the rounds to come, where the speeds measured in this one have changed
            them; else empty. Shape (world_size,).
        group_lrs: Learning rates of all groups of all optimizers, by name, at the same step as `lr`; empty
            where there is one group.
    """

    round: int
    rounds: int
    epoch: int
    global_step: int
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    loss: float | None
    lr: float
    wall_ms: float
    busy_ms: tuple[float, ...]
    data_ms: tuple[float, ...]
    wait_ms: tuple[float, ...]
    sync_ms: float
    anchor: int
    drift: float | None = None
    reason: str = ""
    grad_norm: float | None = None
    grad_norm_max: float | None = None
    param_norm: float | None = None
    share: tuple[float, ...] = ()
    group_lrs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """An epoch begins, or a resumed run goes on in it: orders with its first batches follow.

    Attributes:
        epoch: Epoch index, from 0.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """Record of an evaluation by steps (`EvaluationOptions(unit="step")`).

    Attributes:
        global_step: Steps of all ranks so far.
        epoch: Epoch under way, or that begins next.
        eval: Means and metrics by their names.
        eval_arrays: Metrics with several elements.
    """

    global_step: int
    epoch: int
    eval: Mapping[str, float]
    eval_arrays: Mapping[str, MetricArray] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = (f"eval {name} {format_metric(value)}" for name, value in self.eval.items())
        return " | ".join([f"step {self.global_step:,}", *numbers])


@dataclass(frozen=True, slots=True)
class LeaveGate:
    """Take a rank that is gone out of the gate, for good."""

    rank: int


@dataclass(frozen=True, slots=True)
class CutEvaluation:
    """The evaluation under way is not wanted any more: no rank takes another batch of it."""


@dataclass(frozen=True, slots=True)
class Save:
    """All ranks have saved their state for a checkpoint.

    Attributes:
        capture: Number of the capture.
        position: Where the run stands.
        version: Number of the checkpoint to write; None: none is due.
        snapshots: Wishes for a snapshot that this answers, since the run began.
        model: The rank that has put down the model, too.
        is_best: The monitored number was never better than in the epoch that has ended.
        is_between: The next checkpoint replaces it; see `Schedule`.
    """

    capture: int
    position: Position
    version: int | None
    snapshots: int
    model: int = 0
    is_best: bool = False
    is_between: bool = False


@dataclass(frozen=True, slots=True)
class SavesPutOff:
    """Scheduled checkpoints follow each other faster than their cost allows, and are put off (told once).

    Attributes:
        plan: Their interval.
        cost: Cost of the checkpoint before.
    """

    plan: Interval
    cost: SaveCost

    def __str__(self) -> str:
        cost, plan = self.cost, self.plan
        when = f"every={plan.every:g}, unit={plan.unit!r}"
        if plan.unit == "epoch":
            when = f"max_minutes={plan.max_minutes:g}"
        stands, write, wait = map(format_duration, (cost.stands_ms, cost.write_ms, cost.wait_ms))
        return (
            f"checkpoints of {when} are put off: they might cost "
            f"more than {SHARE:.0%} of the training. The last one stopped all devices for {stands}, and its "
            f"file was written in {write}. The next one follows it after {wait}. "
            "Requested ones and the last one never wait"
        )


@dataclass(frozen=True, slots=True)
class Paused:
    """All workers stand still (`value` True) or move again (False)."""

    value: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """The machine ends the run by a failure that it found itself; the orders to leave follow.

    Attributes:
        error: The failure in words; no thread has an exception of it, so the shell makes one.
        kind: Kind of the failure: of the averaging, of an option, or of NaN and infinite numbers.
    """

    error: str
    kind: Literal["collective", "option", "numbers"] = "collective"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The replica of a rank had NaN or inf parameters, and was left out of the mean.

    Attributes:
        rank: Rank index.
        batch: (epoch, batch) of the first step that showed it; None where the step's loss did not.
    """

    rank: int
    batch: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over and every worker has left.

    Attributes:
        error: The first failure in words, or None.
        stopped: Whether it was ended before its last step or evaluation, by the user or `max_time`.
        position: Where it stands, for a run that goes on from there; None of one that has failed.
        reason: Why it has ended; "" of one that has failed.
        is_planned: It has trained all of its epochs or steps.
    """

    error: str | None
    stopped: bool
    global_step: int
    epochs_done: int
    position: Position | None = None
    reason: str = ""
    is_planned: bool = False

    def __str__(self) -> str:
        why = self.error if self.error is not None else self.reason
        end = "stopped" if self.stopped else "ended"
        return f"{end} after {format_epochs(self.epochs_done)}, step {self.global_step:,}: {why}"


Command = (
    Send
    | LeaveGate
    | CutEvaluation
    | Quarantined
    | Save
    | SavesPutOff
    | Directives
    | AbortGate
    | Average
    | RoundEnded
    | EpochStarted
    | EpochMetrics
    | EvaluationEnded
    | Paused
    | Fail
    | Finish
)
