"""Interfaces of captured steps: forward and backward of a rank, recorded or computed.

The replica of a run is `Capturable`; `CudaGraphs` records it, inside of `watching(worker)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.device import worker_context
from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.streams import Lane
from flowdp.device.worker_context import CurrentWorker

__all__ = [
    "PLAIN",
    "Capturable",
    "Computed",
    "Factors",
    "NotCaptured",
    "TrialStep",
    "Watched",
    "shared",
    "watching",
]

PLAIN = (bool, int, float, str, type(None))
"""Types of values that a graph may repeat as they are."""

FREE = frozenset({"rank", "device", "model", "samples", "record", "sink"})
"""Attributes of its worker that a loss may read: they are the same in every step of a graph."""


class NotCaptured(Exception):
    """A step that cannot be recorded; the text is a sentence for the log."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The place of a micro-batch in its step.

    Attributes:
        share: Share of its loss in that of the step; 1.0: it is all of the step.
        of: Samples of the micro-batch.
    """

    share: float
    of: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of one forward and backward, besides gradients and buffers.

    Those of a captured step that is one micro-batch lie in memory of the graph, until it runs again.

    Attributes:
        loss: Times its share, detached. Shape [].
        weight: Weight of the loss, where it names one. Float64, shape [].
        scalars: Recorded values, in the order of the graph's `records`; an eager step has passed them on.
    """

    loss: Tensor
    weight: Tensor | None = None
    scalars: Sequence[Tensor] = ()


def shared(loss: Tensor, share: Tensor) -> Tensor:
    """A loss times its share, rounded as if that were a Python number: in half precision, once."""
    wide = torch.float32 if loss.dtype in (torch.bfloat16, torch.float16) else loss.dtype
    return (loss.to(wide) * share.to(wide)).to(loss.dtype)


class Capturable(ABC):
    """Forward and backward of one rank, as they are recorded, and as they are computed eagerly.

    Attributes:
        module: Module of the rank.
        trained: The parameters that get gradients.
        lane: Lane of the device where all of it lies.
        shares_generator: Whether other ranks draw from the device's generator, too.
        has_stepped: Whether the first micro-batch has been checked.
        has_begun: Whether the step under way has gradients of an earlier micro-batch.
        casts: The autocast under which the forward runs, to be compared; None: none.
        gradients: Flat memory of the gradients; None: each parameter has its own, or none.
        obstacle: Why no step is captured; None: nothing stands in the way.
    """

    module: nn.Module
    lane: Lane
    shares_generator: bool
    has_stepped: bool
    gradients: FlatGradients | None

    @property
    @abstractmethod
    def trained(self) -> Sequence[Tensor]: ...  # noqa: D102 - as above, and so the next
    @property
    @abstractmethod
    def casts(self) -> torch.dtype | None: ...  # noqa: D102
    @property
    @abstractmethod
    def has_begun(self) -> bool: ...  # noqa: D102
    @property
    @abstractmethod
    def obstacle(self) -> str | None: ...  # noqa: D102

    @abstractmethod
    def forward(
        self, batch: Any, worker: Any, share: float | Tensor, of: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of a micro-batch, shape [], and its weight, if it names one: float64, shape [].

        Args:
            batch: The micro-batch.
            worker: Worker of the run.
            share: See `Factors`; a tensor while one that is not 1.0 is recorded.
            of: See `Factors`.
        """

    @abstractmethod
    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: scaled where there is a gradient scaler."""

    @abstractmethod
    def compute(self, batch: Any, worker: Any, factors: Factors) -> Computed:
        """Forward and backward by the user's Python."""


@dataclass(frozen=True, slots=True)
class TrialStep:
    """The results of a graph's trial run, which changes nothing.

    Attributes:
        computed: See there.
        gradients: Of each trained parameter behind the run, in the order of the module; None: it has none.
        buffers: Buffers of the module behind the run, in its order.
        touched: Whether the graph writes to the gradient of each trained parameter: torch steps no other.
    """

    computed: Computed
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]
    touched: Sequence[bool]


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
    """Stand-in for a worker while its loss is recorded; refuses values that change from step to step."""

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
        The rank's.
    """
    seen = Watched()
    sink, worker.sink = worker.sink, seen.take
    try:
        with worker_context.bound(_Asked(worker)):  # type: ignore[arg-type]
            yield seen
    finally:
        worker.sink = sink
