"""What the user's loss may ask while it runs: who am I, and where does a number go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import SupportsFloat

import torch
from torch import Tensor, nn

__all__ = ["CurrentWorker", "current_worker", "record_scalar"]


@dataclass(slots=True)
class CurrentWorker:
    """The worker that runs the calling thread's step.

    Attributes:
        rank: Index of the replica.
        device: Its device.
        model: Its module.
        epoch: Epoch of the batch, from 0.
        round: The last round that was held, -1 before the first.
        local_step: Steps this rank has completed.
        global_step: Steps of all ranks before this one, as far as known here.
        lr: Learning rate of the first parameter group.
        samples: Samples of the batch.
        sink: Takes what is recorded: name, value, weight.
    """

    rank: int
    device: torch.device
    model: nn.Module
    epoch: int = 0
    round: int = -1
    local_step: int = 0
    global_step: int = 0
    lr: float = 0.0
    samples: int = 0
    sink: Callable[[str, float | Tensor, float], None] = field(repr=False, kw_only=True)

    def record(self, name: str, value: SupportsFloat, weight: float | None = None) -> None:
        """Count a value towards the mean of the epoch; see `record_scalar`."""
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"record_scalar({name!r}) takes one number, not a tensor of shape {tuple(value.shape)}"
            )
        by = float(self.samples if weight is None else weight)
        self.sink(name, value if isinstance(value, Tensor) else float(value), by)


_local = threading.local()


def bind(worker: CurrentWorker) -> None:
    """Make a worker the calling thread's own."""
    _local.worker = worker


def current_worker() -> CurrentWorker:
    """The worker whose step the calling thread runs.

    Raises:
        RuntimeError: The calling thread is no worker of a run.

    Threads:
        A worker's own, inside the loss.
    """
    worker: CurrentWorker | None = getattr(_local, "worker", None)
    if worker is None:
        raise RuntimeError("current_worker() is for the loss of a running Trainer; this thread is no worker")
    return worker


def record_scalar(name: str, value: SupportsFloat, weight: float | None = None) -> None:
    """Count a number towards the epoch's mean under this name.

    Outside a worker this does nothing, so a loss can be tested alone.

    Args:
        name: Under which it stands in `EpochMetrics.scalars`.
        value: A number or a tensor of one element; one on the worker's device is not read back, but summed
            up there.
        weight: What it counts for; None is the samples of the step.

    Raises:
        ValueError: The tensor holds more than one element.

    Threads:
        Any; numbers of one thread go to its own worker.
    """
    worker: CurrentWorker | None = getattr(_local, "worker", None)
    if worker is not None:
        worker.record(name, value, weight)
