"""Captured steps: forward and backward of a rank as a recorded graph that runs without the interpreter lock.

A `Captured` stands between a replica and its forward and backward. It decides, for each micro-batch, whether
a recorded graph runs or the user's Python does; a `Recorder` makes the graphs, one for each kind of device:
on the CPU `step_graph`, on CUDA `cuda_graph`. Both record `replica.weigh(replica._forward(batch, worker),
share, of)` and its gradients, inside of `watching(worker)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flowdp.engine import context
from flowdp.engine.context import CurrentWorker

__all__ = [
    "Captured",
    "Computed",
    "Factors",
    "NotCaptured",
    "Recorder",
    "StepGraph",
    "Trial",
    "Watched",
    "watching",
]

FREE = frozenset({"rank", "device", "model", "samples", "record", "sink"})
"""What a loss may ask its worker: it is the same in every step of a graph."""


class NotCaptured(Exception):
    """A step that cannot be recorded; the text is a sentence for the log."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The numbers of a micro-batch that differ from step to step, and so are inputs of a graph.

    Attributes:
        share: Of its loss in that of the step.
        of: Samples of the rank's part of a window (exact); else those of the micro-batch.
    """

    share: float
    of: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of one forward and backward, beside the gradients and buffers.

    Attributes:
        loss: Times its share, detached. Shape []. Memory that no later run of the graph writes to.
        weight: Of the loss, where it names one (exact). Float64, shape [].
        scalars: Recorded values, in the order of the graph's `records`; an eager step has passed them on.
    """

    loss: Tensor
    weight: Tensor | None = None
    scalars: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of a graph's run that has changed nothing.

    Attributes:
        computed: See there.
        gradients: Of each trained parameter behind the run, in the order of the module; None: it has none.
        buffers: Of the module behind the run, in its order.
    """

    computed: Computed
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]


class StepGraph(Protocol):
    """Forward and backward of micro-batches of one form.

    Attributes:
        records: Name and weight of each recorded scalar.
        draws: Whether it draws random numbers.
    """

    records: Sequence[tuple[str, float]]
    draws: bool

    def run(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Computed:
        """Add to the parameters' gradients, and update the buffers in place.

        Args:
            leaves: The tensors of the micro-batch, in the order of its tree.
            factors: Of the micro-batch.
            generator: Random numbers are drawn from it; None: from the device's own.

        Streams:
            On the lane's `compute`, which is the current one; nothing is read back.
        """
        ...

    def trial(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Trial:
        """Run beside the step: gradients and buffers are as before when it returns. Arguments as of `run`.

        The caller puts the generator back.
        """
        ...


class Captured(Protocol):
    """Decides for each micro-batch of a replica whether a recorded graph runs."""

    def run(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed | None:
        """Forward and backward of a micro-batch; None: nothing was done, and it is to be done eagerly."""
        ...

    def step(self, factor: float) -> bool:
        """See `Recorder.step`."""
        ...


class Recorder(Protocol):
    """Makes the graphs of one replica; one per kind of device.

    Attributes:
        bound: Largest difference between a captured step and an eager one, relative to the largest value of
            the compared tensor; 0: equal bits.
    """

    bound: float

    def record(
        self, batch: Any, leaves: Sequence[Tensor], worker: CurrentWorker, factors: Factors
    ) -> StepGraph:
        """Record forward and backward of this micro-batch; state of the replica is left as it was.

        Raises:
            NotCaptured: It cannot be recorded.
        """
        ...

    def step(self, factor: float) -> bool:
        """Take the optimizer's step by a graph of its own; False: there is none, and it is taken eagerly.

        Args:
            factor: On loss and gradients; see `Replica.step`.
        """
        ...

    def forget(self) -> None:
        """The graphs are of no use any more, for something has changed: let their memory go."""
        ...


@dataclass(slots=True)
class Watched:
    """The numbers that a loss has recorded while it was watched.

    Attributes:
        records: Name and weight of each.
        values: The tensors.
    """

    records: list[tuple[str, float]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def take(self, name: str, value: float | Tensor, weight: float) -> None:
        """Take a number; the `sink` of a worker.

        Raises:
            NotCaptured: It is no tensor, and so would be the same in every step.
        """
        if not isinstance(value, Tensor):
            raise NotCaptured(
                f"the loss records a number of Python under {name!r}, which a captured step would repeat as "
                "it is: record a tensor"
            )
        self.records.append((name, weight))
        self.values.append(value.detach())


class _Asked:
    """Stands for a worker while its loss is recorded, and refuses what changes from step to step."""

    def __init__(self, worker: CurrentWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        if name not in FREE:
            raise NotCaptured(
                f"the loss reads current_worker().{name}, which a captured step would read once and for all"
            )
        return getattr(self._worker, name)


@contextmanager
def watching(worker: CurrentWorker) -> Iterator[Watched]:
    """Record a loss: numbers go into the result, and reading the state of the step raises `NotCaptured`.

    Threads:
        The worker's.
    """
    seen = Watched()
    sink, worker.sink = worker.sink, seen.take
    context.bind(_Asked(worker))  # type: ignore[arg-type]
    try:
        yield seen
    finally:
        worker.sink = sink
        context.bind(worker)
