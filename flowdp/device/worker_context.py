"""The current worker: rank, device and step for the user's loss, and a place to record numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["CurrentWorker", "Steps", "current_worker", "record_scalar"]


class Steps(Protocol):
    """Operations of a worker for the user's `train_step`; see `CurrentWorker`.

    Attributes:
        optimizers: As the user gave them.
    """

    optimizers: Sequence[Optimizer] | Mapping[Any, Optimizer]

    def backward(self, loss: Tensor, **options: Any) -> None:
        """See `CurrentWorker.backward`."""
        ...

    def optimize(self, optimizer: Optimizer) -> None:
        """See `CurrentWorker.step`."""
        ...


@dataclass(slots=True)
class CurrentWorker:
    """The worker that runs the calling thread's step.

    Attributes:
        rank: Index of the replica.
        device: Its device.
        model: Its module.
        epoch: Epoch of the batch, from 0.
        round: The last round that was held, -1 before the first.
        local_step: Steps this rank has completed; under "exact" also those without a part for it.
        global_step: Steps of all ranks before this one, as far as known here.
        lr: Learning rate of the first parameter group.
        samples: Samples of the batch; in `Callback.on_step` of the step, 0 without a part of it (exact).
        sink: Receives recorded numbers: name, value, weight.
        steps: Operations for a `train_step`; None with a loss.
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
    steps: Steps | None = field(default=None, repr=False, kw_only=True)

    @property
    def optimizers(self) -> Sequence[Optimizer] | Mapping[Any, Optimizer]:
        """The replica's optimizers: a sequence, of one where one was given, or the mapping that was given.

        Raises:
            RuntimeError: The run has a loss and no `train_step`.
        """
        return self._own_steps().optimizers

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of a loss, scaled where the precision is "fp16". In place of `loss.backward()`.

        Args:
            loss: A scalar.
            options: As of `Tensor.backward`: retain_graph, create_graph, inputs.

        Raises:
            RuntimeError: The run has a loss and no `train_step`.
        """
        self._own_steps().backward(loss, **options)

    def step(self, optimizer: Optimizer) -> None:
        """Clip the gradients of an optimizer's own parameters, step it, and clear them.

        Raises:
            RuntimeError: The run has a loss and no `train_step`.
        """
        self._own_steps().optimize(optimizer)

    def record(self, name: str, value: SupportsFloat | None, weight: float | None = None) -> None:
        """Count a value towards the mean of the epoch; see `record_scalar`.

        None, the loss of a device without samples (exact), counts for nothing.
        """
        if value is None and not self.samples:
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"record_scalar({name!r}) takes one number, not a tensor of shape {tuple(value.shape)}"
            )
        by = float(self.samples if weight is None else weight)
        self.sink(name, value if isinstance(value, Tensor) else float(value), by)  # type: ignore[arg-type]

    def _own_steps(self) -> Steps:
        if self.steps is None:
            raise RuntimeError(
                "a worker's optimizers, backward and step are for Trainer(train_step=...); with a loss the "
                "Trainer does all that itself"
            )
        return self.steps


_local = threading.local()


def bind(worker: CurrentWorker) -> None:
    """Make a worker the calling thread's own."""
    _local.worker = worker


@contextmanager
def bound(worker: CurrentWorker) -> Iterator[None]:
    """Make a worker the calling thread's own for a while."""
    before: CurrentWorker | None = getattr(_local, "worker", None)
    _local.worker = worker
    try:
        yield
    finally:
        _local.worker = before


def current_worker() -> CurrentWorker:
    """Current worker of the calling thread.

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
        weight: Weight of the value; None is the samples of the step.

    Raises:
        ValueError: The tensor holds more than one element.

    Threads:
        Any; numbers of one thread go to its own worker.
    """
    worker: CurrentWorker | None = getattr(_local, "worker", None)
    if worker is not None:
        worker.record(name, value, weight)
