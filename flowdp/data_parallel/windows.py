"""Gradient windows: each device works through its own whole batches, and the gradients are summed once.

Forward, loss and backward run batch by batch, so each device has one graph at a time. A batch's loss counts
by its samples in the window: the sum is the gradient of the mean over all of them, as of one big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data_parallel.call import call_parts
from flowdp.data_parallel.comparison import lost_gradient, outside
from flowdp.data_parallel.cut import Part
from flowdp.data_parallel.gradient_sum import Gradients, Packed, accumulate, add_up, without_hooks
from flowdp.data_parallel.join import join
from flowdp.data_parallel.layout import PLAIN
from flowdp.data_parallel.loss_context import BatchPlan, Results, Traces, last_outputs
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.copies import move
from flowdp.device.trees import field_of, tree_map
from flowdp.policy.efficiency import Activity

__all__ = ["Piece", "Window", "WindowResult", "run_window"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch for a rank.

    Attributes:
        arrive: To be called before the batch is used, on the stream that uses it.
    """

    rank: int
    batch: Any
    samples: int
    arrive: Callable[[], None] = lambda: None


class Window:
    """The batches that all devices work through before the optimizer steps.

    `window[key]` is a field of them all (`window["label"]`, `window[1]`), in the order of the outputs, on the
    first device.

    Args:
        pieces: In order.
        home: The first device.

    Attributes:
        pieces: As given.
        home: As given.
        sizes: Samples of each of them.
        samples: Samples of all of them.
    """

    def __init__(self, pieces: Sequence[Piece], home: torch.device) -> None:
        self.pieces = tuple(pieces)
        self.home = home
        self.sizes = [piece.samples for piece in pieces]
        self.samples = sum(self.sizes)

    def per_rank(self, world_size: int) -> tuple[list[int], list[int]]:
        """Samples and batches of each rank. Both of shape (world_size,)."""
        samples, batches = [0] * world_size, [0] * world_size
        for piece in self.pieces:
            samples[piece.rank] += piece.samples
            batches[piece.rank] += 1
        return samples, batches

    def join(self, trees: Sequence[Any]) -> Any:
        """Put one tree for each batch together, on the first device.

        Raises:
            FlowdpError: They cannot be.
        """
        return join(tree_map(self._bring_home, list(trees)), self.sizes, PLAIN)

    def _bring_home(self, leaf: Any) -> Any:
        return move(leaf, self.home) if isinstance(leaf, Tensor) else leaf

    def __getitem__(self, field: Any) -> Any:
        for piece in self.pieces:
            piece.arrive()
        return self.join([field_of(piece.batch, field) for piece in self.pieces])


class WindowResult:
    """Result of a window, joined over its batches on the first device when it is read.

    Without a loss function `output` has its graph, for a loss of the caller's; else everything is detached.

    Args:
        samples: Samples of the window.
        loss: Mean over the samples, before the step. Shape []. None without a loss function.
        joined: Makes the output and the traces.

    Attributes:
        samples: As given.
        loss: As given.
    """

    def __init__(self, samples: int, loss: Tensor | None, joined: Callable[[], tuple[Any, Traces]]) -> None:
        self.samples = samples
        self.loss = loss
        self._joined = cache(joined)

    @property
    def output(self) -> Any:
        """Outputs of the module.

        Raises:
            FlowdpError: The outputs of the batches cannot be joined.
        """
        return self._joined()[0]

    @property
    def traces(self) -> Traces:
        """Outputs of each of the tagged submodules, call by call."""
        return self._joined()[1]

    @property
    def tags(self) -> dict[str, Any]:
        """Output of each of the tagged submodules in its last call."""
        return last_outputs(self.traces)


def run_window(
    window: Window,
    plan: BatchPlan,
    replicas: Replicas,
    *,
    scale: Callable[[Tensor], Tensor] | None = None,
    guards: bool = False,
) -> WindowResult:
    """Let every device work through its batches of a window.

    With a loss function the summed gradients are at the user's module when this returns; where gradients
    are switched off, only the losses are computed.

    Args:
        window: Batches of all devices.
        plan: Processing of each.
        replicas: The modules.
        scale: Scales each loss before its backward; None: it is differentiated as it is.
        guards: Whether a loss with parameters of its own, which get no gradient here, is an error.

    Raises:
        FlowdpError: The loss is not a scalar, or depends on nothing that is trained.

    Streams:
        As `Replicas.each`.
    """
    if plan.loss is None:
        return _forward(window, plan, replicas)
    replicas.follow()
    of_rank = [
        [piece for piece in window.pieces if piece.rank == rank] for rank in range(len(replicas.modules))
    ]
    is_trained = torch.is_grad_enabled()
    sums = replicas.gradient_sum(replicas.trained(), is_whole=is_trained and all(of_rank))
    results: list[Any] = [None] * len(window.pieces)
    leaves: list[dict[int, Tensor]] = []  # that are no parameters, of each loss

    def work(rank: int) -> Packed:
        """A rank's batches one after another; returns the sum of their gradients."""
        total: Gradients = []

        def step(module: nn.Module, piece: Piece) -> Results:
            nonlocal total
            piece.arrive()
            made = plan.results(module, piece.batch)
            if is_trained:
                assert made.loss is not None
                loss = made.loss * (piece.samples / window.samples)
                if guards:
                    leaves.append(outside(loss, replicas.trained(rank)))
                with replicas.walking(rank):  # not around forward: in a mode it would not be compiled
                    grads = torch.autograd.grad(
                        loss if scale is None else scale(loss), replicas.trained(rank), allow_unused=True
                    )
                total = add_up([total, list(grads)]) if total else list(grads)
            return detached(made)

        for place, piece in enumerate(window.pieces):
            if piece.rank == rank:
                results[place] = replicas.call(rank, piece.samples, step, piece)
        return sums.pack(total, replicas.devices[rank])

    jobs = [partial(work, rank) if pieces else None for rank, pieces in enumerate(of_rank)]
    with without_hooks(replicas.trained()):  # they shall run on the sum
        done = replicas.each(jobs, activity=Activity.STEP)
    for mine, other in combinations(leaves, 2):  # one that a loss makes itself is of one batch alone
        for key in mine.keys() & other.keys():
            raise lost_gradient("the loss of a window", mine[key])
    if is_trained:
        with replicas.summing.running(Activity.SUM):
            accumulate(replicas.trained(), sums.sum([packed for packed in done if packed is not None]))
    # The caller's streams on all devices come after the creation of the losses.
    loss = window.join([result.loss for result in results])
    return WindowResult(window.samples, loss, partial(window.join, [result[1:] for result in results]))


def _forward(window: Window, plan: BatchPlan, replicas: Replicas) -> WindowResult:
    """All forwards, joined with their graphs: the caller computes the loss."""

    def run(module: nn.Module, part: Part) -> tuple[Any, Traces]:
        (piece,) = part.args
        piece.arrive()
        return plan.results(module, piece.batch)[1:]

    parts = [Part(((piece,), {}), piece.rank, piece.samples) for piece in window.pieces]
    both = join(call_parts(replicas, parts, run), window.sizes, PLAIN)
    return WindowResult(window.samples, None, lambda: both)


def detached(results: Results) -> Results:
    """Results without their graph."""
    return Results(*tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, [*results]))
