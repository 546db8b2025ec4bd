"""Interfaces of captured steps: the forward and backward of a rank, and graphs of them.

A `Recorder` makes graphs, one for each kind of device: on the CPU `step_graph`, on CUDA `cuda_graph`. Both
record the `forward` of a `Capturable` and its gradients, inside of `watching(worker)`. The replica of a run
is capturable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowdp.data.trees import Form, flatten, unflatten
from flowdp.device import worker_context
from flowdp.device.draws import OwnDraws
from flowdp.device.streams import Lane
from flowdp.device.worker_context import CurrentWorker

__all__ = [
    "PLAIN",
    "Capturable",
    "Computed",
    "Factors",
    "NotCaptured",
    "Outputs",
    "Passed",
    "Recorder",
    "StepGraph",
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
    """The numbers of a micro-batch that differ from step to step, and so are inputs of a graph.

    Attributes:
        share: Share of its loss in that of the step.
        of: Samples of the micro-batch.
    """

    share: float
    of: int


@dataclass(frozen=True, slots=True)
class Passed:
    """The results of a forward, with their graph.

    Attributes:
        loss: As it is differentiated. Shape [].
        weight: Weight of the loss, where it names one. Float64, shape [].
        outputs: Further results, a tree; None: there are none.
    """

    loss: Tensor
    weight: Tensor | None = None
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of one forward and backward, besides gradients and buffers.

    They lie in memory that no later run of a graph writes to.

    Attributes:
        loss: Times its share, detached. Shape [].
        weight: Weight of the loss, where it names one. Float64, shape [].
        scalars: Recorded values, in the order of the graph's `records`; an eager step has passed them on.
        outputs: As of `Passed`, detached.
    """

    loss: Tensor
    weight: Tensor | None = None
    scalars: Sequence[Tensor] = ()
    outputs: Any = None


def shared(loss: Tensor, share: Tensor) -> Tensor:
    """A loss times its share, rounded as if that were a Python number: in half precision, once."""
    wide = torch.float32 if loss.dtype in (torch.bfloat16, torch.float16) else loss.dtype
    return (loss.to(wide) * share.to(wide)).to(loss.dtype)


class Capturable(Protocol):
    """Forward and backward of one rank, as they are recorded, and as they are computed eagerly.

    Attributes:
        module: Module of the rank.
        trained: The parameters that get gradients.
        lane: Lane of the device where all of it lies.
        draws: The mode of the rank's own random numbers; None: it draws from the device's generator.
        shares_generator: Whether other ranks draw from the device's generator, too.
        has_stepped: Whether the first micro-batch has been checked.
        casts: The autocast under which the forward runs, to be compared; None: none.
        has_flat_gradients: Whether the parameters' gradients lie in memory that stays for good.
        gives_gradients: Whether other code keeps the gradients of a step, so that no later one may write
            to their memory.
        obstacle: Why no step is captured; None: nothing stands in the way.
    """

    @property
    def module(self) -> nn.Module: ...  # noqa: D102 - as above, and so the next
    @property
    def trained(self) -> Sequence[Tensor]: ...  # noqa: D102
    @property
    def lane(self) -> Lane: ...  # noqa: D102
    @property
    def draws(self) -> OwnDraws | None: ...  # noqa: D102
    @property
    def shares_generator(self) -> bool: ...  # noqa: D102
    @property
    def has_stepped(self) -> bool: ...  # noqa: D102
    @property
    def casts(self) -> object: ...  # noqa: D102
    @property
    def has_flat_gradients(self) -> bool: ...  # noqa: D102
    @property
    def gives_gradients(self) -> bool: ...  # noqa: D102
    @property
    def obstacle(self) -> str | None: ...  # noqa: D102

    def forward(self, batch: Any, worker: Any, share: float | Tensor, of: int | Tensor) -> Passed:
        """Forward of a micro-batch, with its graph.

        Args:
            batch: The micro-batch.
            worker: Worker of a run; None in a loop that the user owns.
            share: See `Factors`; a tensor while it is recorded.
            of: See `Factors`; a tensor while it is recorded.
        """
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: scaled where there is a gradient scaler."""
        ...

    def compute(self, batch: Any, worker: Any, factors: Factors) -> Computed:
        """Forward and backward by the user's Python."""
        ...


_TENSOR = object()


@dataclass(frozen=True, slots=True)
class Outputs:
    """A tree of results without its tensors: the rest is the same in every run of a graph.

    Attributes:
        leaves: With a mark in the places of tensors.
        form: Form of the tree.
    """

    leaves: Sequence[Any]
    form: Form

    @classmethod
    def opened(cls, tree: Any) -> tuple[list[Tensor], Outputs | None]:
        """The tensors of a tree, and the rest of it; None: it has no outputs.

        Raises:
            NotCaptured: A leaf is neither a tensor nor a plain value.
        """
        if tree is None:
            return [], None
        leaves, form = flatten(tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for leaf in rest:
            if leaf is not _TENSOR and not _is_constant(leaf):
                raise NotCaptured(
                    f"the model returns a {type(leaf).__name__}, which a captured step would not make anew"
                )
        return tensors, cls(rest, form)

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with these tensors."""
        given = iter(tensors)
        return unflatten(
            [
                next(given) if leaf is _TENSOR else [*leaf] if type(leaf) is list else leaf
                for leaf in self.leaves
            ],
            self.form,
        )


def _is_constant(leaf: object) -> bool:
    if isinstance(leaf, (list, tuple)):
        return all(isinstance(item, (tuple, *PLAIN)) and _is_constant(item) for item in leaf)
    return isinstance(leaf, PLAIN)


@dataclass(frozen=True, slots=True)
class TrialStep:
    """The results of a graph's trial run, which changes nothing.

    Attributes:
        computed: See there.
        gradients: Of each trained parameter behind the run, in the order of the module; None: it has none.
        buffers: Buffers of the module behind the run, in its order.
        touched: Whether the graph adds to the gradient of each trained parameter: torch steps no other.
    """

    computed: Computed
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]
    touched: Sequence[bool]


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

        A gradient that was not there lies in fresh memory, where gradients are given away.

        Args:
            leaves: The tensors of the micro-batch, in the order of its tree.
            factors: Factors of the micro-batch.
            generator: Random numbers are drawn from it; None: from the device's own.

        Streams:
            On the lane's `compute`, which is the current one; nothing is read back.
        """
        ...

    def trial(
        self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None
    ) -> TrialStep:
        """Run without effect: gradients and buffers are as before when it returns. Arguments as of `run`.

        The caller puts the generator back.
        """
        ...


class Recorder(Protocol):
    """Makes the graphs of one rank; one per kind of device.

    Attributes:
        bound: Largest difference between a captured step and an eager one, relative to the largest value of
            the compared tensor; 0: equal bits.
    """

    bound: float

    def record(
        self, batch: Any, leaves: Sequence[Tensor], worker: CurrentWorker | None, factors: Factors
    ) -> StepGraph:
        """Record forward and backward of this micro-batch; state of the rank is left as it was.

        Args:
            batch: The micro-batch.
            leaves: Its tensors.
            worker: Worker of this step; None outside of a run.
            factors: Factors of the micro-batch.

        Raises:
            NotCaptured: It cannot be recorded.
        """
        ...

    def forget(self) -> None:
        """Free the graphs and their memory: something that they depend on has changed."""
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
def watching(worker: CurrentWorker | None) -> Iterator[Watched]:
    """Record a loss: numbers go into the result, and reading the state of the step raises `NotCaptured`.

    Without a worker there is no such state, and numbers go nowhere.

    Threads:
        The rank's.
    """
    seen = Watched()
    if worker is None:
        yield seen
        return
    sink, worker.sink = worker.sink, seen.take
    try:
        with worker_context.bound(_Asked(worker)):  # type: ignore[arg-type]
            yield seen
    finally:
        worker.sink = sink
