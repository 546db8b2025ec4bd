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

from flowdp.collective.gradient_sum import Gradients, accumulate, add_up, without_hooks
from flowdp.data.trees import field_of, tensors_of, tree_map
from flowdp.data_parallel.call import call_parts
from flowdp.data_parallel.comparison import Call, lost_gradient, outside
from flowdp.data_parallel.cut import Part
from flowdp.data_parallel.device_copies import Packed
from flowdp.data_parallel.join import join
from flowdp.data_parallel.layout import PLAIN, Callee
from flowdp.data_parallel.loss_context import BatchPlan, Traces
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.window_step import Results, WindowCapture, call, last_outputs, results_of, train
from flowdp.device.copies import move
from flowdp.graphs.base import Factors

__all__ = ["Piece", "Window", "WindowResult", "run_alone", "run_window", "window_call"]


ADVICE = (
    "A part of a batch counts by its samples, which lie along dim 0. Where a loss is a mean over something "
    "else, or a sum, leave loss_fn out and compute it of result.output; where the samples lie elsewhere, "
    "call the module in a loop over the loader: for such calls setup() has dim=, split=, join= and reduce=."
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch, or a part of one, on a rank's device.

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
        whole: Makes the batch that was cut into the pieces; None where each is a batch of its own.

    Attributes:
        pieces: As given.
        home: As given.
        whole: As given; it makes the batch anew each time where that lies on devices.
        sizes: Samples of each of them.
        samples: Samples of all of them.
    """

    def __init__(
        self, pieces: Sequence[Piece], home: torch.device, whole: Callable[[], Any] | None = None
    ) -> None:
        self.pieces = tuple(pieces)
        self.home = home
        self.whole = whole
        self.sizes = [piece.samples for piece in pieces]
        self.samples = sum(self.sizes)

    def of_rank(self, world_size: int) -> list[list[Piece]]:
        """The pieces of each rank. Shape (world_size, pieces)."""
        return [[piece for piece in self.pieces if piece.rank == rank] for rank in range(world_size)]

    def per_rank(self, world_size: int) -> tuple[list[int], list[int]]:
        """Samples and batches of each rank. Both of shape (world_size,)."""
        ranks = self.of_rank(world_size)
        return [sum(piece.samples for piece in own) for own in ranks], [len(own) for own in ranks]

    def __getitem__(self, field: Any) -> Any:
        for piece in self.pieces:
            piece.arrive()
        return _join([field_of(piece.batch, field) for piece in self.pieces], self.sizes, self.home)


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


def window_call(window: Window, plan: BatchPlan, world_size: int, told: set[str]) -> Call:
    """The processing of a window that was cut, as a call for `check_call`."""
    assert window.whole is not None

    def run(module: nn.Module, part: Part) -> Any:
        if plan.loss is None:
            return call(module, part.args[0], plan)[0]
        return {"loss": results_of(module, part.args[0], plan).loss}

    callee = Callee(run)
    callee.name = "the loss of a window" if plan.loss else "the module"
    sizes, _ = window.per_rank(world_size)
    return Call(PLAIN, callee, run, (window.whole(),), {}, tuple(sizes), told, lambda *_: ADVICE)


def run_alone(
    window: Window, plan: BatchPlan, module: nn.Module, capture: WindowCapture | None = None
) -> WindowResult:
    """Let the calling thread work through a window, by the user's module; see `run_window`."""
    if plan.loss is None:
        (piece,) = window.pieces
        piece.arrive()
        both = call(module, piece.batch, plan)
        return WindowResult(window.samples, None, lambda: both)
    results = []
    for piece in window.pieces:
        piece.arrive()
        factors = Factors(piece.samples / window.samples, piece.samples)
        if capture is None:
            results.append(train(module, piece.batch, plan, factors.share, Tensor.backward))
        else:
            results.append(capture.step.run(piece.batch, plan, factors))
    return _result(window, results)


def run_window(window: Window, plan: BatchPlan, replicas: Replicas, *, guards: bool = False) -> WindowResult:
    """Let every device work through its batches of a window.

    With a loss function the summed gradients are at the user's module when this returns; where gradients
    are switched off, only the losses are computed.

    Args:
        window: Batches of all devices.
        plan: Processing of each.
        replicas: The modules.
        guards: Whether a loss with parameters of its own, which get no gradient here, is an error.

    Raises:
        FlowdpError: The loss is not a scalar, or depends on nothing that is trained.

    Streams:
        As `Replicas.each`.
    """
    if plan.loss is None:
        return _forward(window, plan, replicas)
    replicas.follow()
    of_rank = window.of_rank(len(replicas.modules))
    is_trained = torch.is_grad_enabled()
    carrier = replicas.carrier(replicas.trained(), is_whole=is_trained and all(of_rank))
    results: list[Any] = [None] * len(window.pieces)
    leaves: list[dict[int, Tensor]] = []  # that are no parameters, of each loss
    given: list[Tensor] = []
    if guards:
        whole = None if window.whole is None else window.whole()
        given = list(tensors_of([whole, *(piece.batch for piece in window.pieces)]))

    def work(rank: int) -> Packed:
        """A rank's batches one after another; returns the sum of their gradients."""
        total: Gradients = []

        def backward(loss: Tensor) -> None:
            nonlocal total
            found: Gradients = []
            if guards:
                leaves.append(outside(loss, [*replicas.trained(rank), *given]))
            with replicas.walking(rank):  # not around forward: in a mode it would not be compiled
                found += torch.autograd.grad(loss, replicas.trained(rank), allow_unused=True)
            total = add_up([total, found]) if total else found

        def step(module: nn.Module, piece: Piece) -> Results:
            piece.arrive()
            return train(module, piece.batch, plan, piece.samples / window.samples, backward)

        for place, piece in enumerate(window.pieces):
            if piece.rank == rank:
                results[place] = replicas.call(rank, piece.samples, step, piece)
        return carrier.pack(total, replicas.devices[rank])

    jobs = [partial(work, rank) if own else None for rank, own in enumerate(of_rank)]
    with without_hooks(replicas.trained()):  # they shall run on the sum
        done = replicas.each(jobs)
    for own, other in combinations(leaves, 2):  # one that a loss makes itself is of one batch alone
        for key in own.keys() & other.keys():
            raise lost_gradient("the loss of a window", own[key])
    if is_trained:
        with replicas.summing.running():
            accumulate(replicas.trained(), carrier.sum([packed for packed in done if packed is not None]))
    return _result(window, results)


def _forward(window: Window, plan: BatchPlan, replicas: Replicas) -> WindowResult:
    """All forwards, joined with their graphs: the caller computes the loss."""

    def run(module: nn.Module, part: Part) -> tuple[Any, Traces]:
        (piece,) = part.args
        piece.arrive()
        return call(module, piece.batch, plan)

    parts = [Part(((piece,), {}), piece.rank, piece.samples) for piece in window.pieces]
    both = join(call_parts(replicas, parts, run), window.sizes, PLAIN)
    return WindowResult(window.samples, None, lambda: both)


def _result(window: Window, results: Sequence[Results]) -> WindowResult:
    # The caller's streams on all devices come after their creation.
    loss = _join([own.loss for own in results], window.sizes, window.home)
    trees = [(own.output, own.traces) for own in results]
    return WindowResult(window.samples, loss, partial(_join, trees, window.sizes, window.home))


def _join(trees: Sequence[Any], sizes: Sequence[int], home: torch.device) -> Any:
    def bring(leaf: Any) -> Any:
        return move(leaf, home) if isinstance(leaf, Tensor) else leaf

    return join([tree_map(bring, tree) for tree in trees], sizes, PLAIN)
