"""Result and status of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flowdp.checkpoint.resume import StopPosition
from flowdp.policy.formats import format_metric
from flowdp.policy.launch_limit import BOUND
from flowdp.policy.tally import EpochMetrics
from flowdp.replica.factories import Optimizers

__all__ = ["Status", "TrainedState", "alone", "on_cpu", "optimizer_state"]


@dataclass(frozen=True, repr=False)
class TrainedState:
    """Result of a run.

    Attributes:
        state_dict: Parameters and buffers by the module's own names, on the CPU.
        optimizer_state: `state_dict()` of rank 0's optimizer, on the CPU; of several a list or a mapping, as
            they were given.
        history: One record per epoch; where `max_steps` ended the run inside an epoch, the last one is of a
            part of it, and has `is_complete=False`.
        global_step: Steps of all ranks.
        epochs_done: Complete epochs, without one that `max_steps` cut short; `resume` continues in that.
        interrupted: The run was stopped before its last step.
        stopped_at: Position inside an epoch, for `resume`; None where reading cannot begin there.
    """

    state_dict: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Any]
    history: tuple[EpochMetrics, ...]
    global_step: int
    epochs_done: int
    interrupted: bool
    stopped_at: StopPosition | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        loss = self.history[-1].loss if self.history else None
        last = "" if loss is None else f", loss {format_metric(loss)}"
        end = ", interrupted" if self.interrupted else ""
        return (
            f"<TrainedState: {len(self.state_dict)} tensors, {self.epochs_done} epochs, step "
            f"{self.global_step:,}{last}{end}>"
        )

    def load_into(self, module: nn.Module) -> nn.Module:
        """Copy the parameters and buffers into a module of the same structure, and return it."""
        module.load_state_dict(self.state_dict)
        return module


@dataclass(frozen=True)
class Status:
    """Status of a run; prints as one line.

    Attributes:
        phase: "running", "paused", "done", "stopped" or "failed".
        epochs_done: Complete epochs.
        global_step: Steps of all ranks in the rounds held so far.
        round: The last round, or None.
        local_steps: Steps per rank, those since the last round included. Shape (world_size,).
        throttled: Why a rank may take no step, per rank; None for one that may. Shape (world_size,).
        pieces: Into how many a micro-batch is cut, per rank, because its device ran out of memory; 1 where it
            is whole. Shape (world_size,).
        launch_bound: Part of the ranks' time that they wait to launch their steps, because Python runs in one
            thread at a time; 0 where that is no limit. None: not known, or one rank.
        problems: Problems that did not end the run: replicas that had NaN or infinite numbers, ranks
            that left or ran out of memory, callbacks that raised or do not return, a checkpoint or event log
            that could not be written, a standstill at the start or while paused.
    """

    phase: str
    epochs_done: int
    global_step: int
    round: int | None
    local_steps: tuple[int, ...]
    throttled: tuple[str | None, ...]
    pieces: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    launch_bound: float | None = None

    def __str__(self) -> str:
        steps = " ".join(map(str, self.local_steps))
        line = (
            f"{self.phase} | {self.epochs_done} epochs | step {self.global_step:,} | steps per rank {steps}"
        )
        if self.launch_bound is not None and self.launch_bound >= BOUND:
            line += f" | waits to launch {100 * self.launch_bound:.0f} %"
        return line + (f" | problems: {len(self.problems)}" if self.problems else "")


def optimizer_state(optimizers: Optimizers) -> Any:
    """The state of the one optimizer, or of several in the form in which they were given."""
    if isinstance(optimizers, Mapping):
        return {name: one.state_dict() for name, one in optimizers.items()}
    return alone([one.state_dict() for one in optimizers])


def alone(states: Any) -> Any:
    """The one of a list of one; anything else as it is."""
    return states[0] if isinstance(states, list) and len(states) == 1 else states


def on_cpu(tree: Any) -> Any:
    """A tree with its tensors copied to the CPU; anything else as it is."""

    def copied(value: Any) -> Any:
        # A copy: a view would keep, and a file would hold, the whole flat memory.
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    return tree_map(copied, tree)
