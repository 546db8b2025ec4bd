"""Gradient windows: each device works through its own whole batches, and the gradients are summed once.

Forward, loss and backward run batch by batch, so each device has one graph at a time. A batch's loss counts
by its samples in the window: the sum is the gradient of the mean over all of them, as of one big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import Gradients, accumulate, add_up, without_hooks
from flowdp.data.trees import field_of, tensors_of, tree_map
from flowdp.data_parallel.call import call_parts
from flowdp.data_parallel.comparison import Call
from flowdp.data_parallel.cut import Part
from flowdp.data_parallel.device_copies import Copying, Packed, Reducing
from flowdp.data_parallel.join import join
from flowdp.data_parallel.layout import PLAIN, Callee
from flowdp.data_parallel.loss_context import BatchPlan, LossContext, Traces
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.window_step import (
    Results,
    WindowCapture,
    call,
    differentiate,
    gradients_of,
    last_outputs,
)
from flowdp.device.copies import move
from flowdp.graphs.base import Factors

__all__ = [
    "Piece",
    "Window",
    "WindowResult",
    "run_window",
    "window_call",
]


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
        is_cut: Whether they are parts of one batch.
        samples: Samples of all of them.
    """

    def __init__(
        self, pieces: Sequence[Piece], home: torch.device, whole: Callable[[], Any] | None = None
    ) -> None:
        self.pieces = tuple(pieces)
        self.is_cut = whole is not None
        self._whole = whole
        self.samples = sum(piece.samples for piece in pieces)
        self._home = home

    @property
    def whole(self) -> Any:
        """The batch that was cut into the pieces; made anew each time where it lies on devices."""
        assert self._whole is not None
        return self._whole()

    def bytes_of(self, ranks: Collection[int]) -> int:
        """Bytes of the tensors of these ranks' pieces."""
        parts = (tensors_of(piece.batch) for piece in self.pieces if piece.rank in ranks)
        return sum(tensor.nbytes for part in parts for tensor in part)

    def per_rank(self, world_size: int) -> tuple[list[int], list[int]]:
        """Samples and batches of each rank. Both of shape (world_size,)."""
        samples, batches = [0] * world_size, [0] * world_size
        for piece in self.pieces:
            samples[piece.rank] += piece.samples
            batches[piece.rank] += 1
        return samples, batches

    def __getitem__(self, field: Any) -> Any:
        for piece in self.pieces:
            piece.arrive()
        fields = [field_of(piece.batch, field) for piece in self.pieces]
        return _join(fields, [piece.samples for piece in self.pieces], self._home)


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
        self._join = joined

    @cached_property
    def _joined(self) -> tuple[Any, Traces]:
        return self._join()

    @property
    def output(self) -> Any:
        """Outputs of the module.

        Raises:
            FlowdpError: The outputs of the batches cannot be joined.
        """
        return self._joined[0]

    @property
    def traces(self) -> Traces:
        """Outputs of each of the tagged submodules, call by call."""
        return self._joined[1]

    @property
    def tags(self) -> dict[str, Any]:
        """Output of each of the tagged submodules in its last call."""
        return last_outputs(self.traces)


def window_call(window: Window, plan: BatchPlan, told: set[str]) -> Call:
    """The processing of a window with a `whole`, as a call for `check_call`."""

    def run(module: nn.Module, part: Part) -> Any:
        output, traces = call(module, part.args[0], plan)
        if plan.loss is None:
            return output
        return {"loss": plan.loss(LossContext(output, part.args[0], last_outputs(traces), traces)).squeeze()}

    sizes = [0] * (1 + max(piece.rank for piece in window.pieces))
    for piece in window.pieces:
        sizes[piece.rank] += piece.samples
    callee = Callee(run)
    callee.name = "the loss of a window" if plan.loss else "the module"
    return Call(PLAIN, callee, run, (window.whole,), {}, tuple(sizes), told, lambda *_: ADVICE)


def run_window(
    window: Window,
    plan: BatchPlan,
    module: nn.Module,
    replicas: Replicas | None = None,
    *,
    capture: WindowCapture | None = None,
) -> WindowResult:
    """Let every device work through its batches of a window.

    With a loss function the summed gradients are at the user's module when this returns; where gradients
    are switched off, only the losses are computed.

    Without replicas there is one device, whose work is done by the calling thread.

    Raises:
        FlowdpError: The loss is not a scalar, or depends on nothing that is trained.

    Streams:
        As `Replicas.each`.
    """
    if replicas is not None:
        return _run_all(window, plan, replicas)
    if plan.loss is None:
        (piece,) = window.pieces
        piece.arrive()
        both = call(module, piece.batch, plan)
        return WindowResult(window.samples, None, lambda: both)
    answers = []
    for piece in window.pieces:
        piece.arrive()
        factors = Factors(piece.samples / window.samples, piece.samples)
        if capture is None:
            answers.append(differentiate(module, piece.batch, plan, factors))
        else:
            answers.append(capture.step.run(piece.batch, plan, factors))
    return _result(answers, window)


def _run_all(window: Window, plan: BatchPlan, replicas: Replicas) -> WindowResult:
    if plan.loss is None:
        both = _forward_all(window, plan, replicas)
        return WindowResult(window.samples, None, lambda: both)
    replicas.follow()
    of_rank = [[p for p in window.pieces if p.rank == rank] for rank in range(len(replicas.modules))]
    is_trained = torch.is_grad_enabled()
    carrier = replicas.carrier(replicas.trained(), is_whole=is_trained and all(of_rank))
    jobs = [
        partial(_train, replicas, rank, own, window.samples, plan, carrier) if own else None
        for rank, own in enumerate(of_rank)
    ]
    with without_hooks(replicas.trained()):  # they shall run on the sum
        done = replicas.each(jobs, parts=of_rank)
    if is_trained:
        with replicas.summing.running():
            packed = [answer[1] for answer in done if answer is not None and answer[1] is not None]
            accumulate(replicas.trained(), carrier.sum(packed))
    answers = {rank: iter(answer[0]) for rank, answer in enumerate(done) if answer is not None}
    return _result([next(answers[piece.rank]) for piece in window.pieces], window)


def _train(
    replicas: Replicas,
    rank: int,
    pieces: Sequence[Piece],
    samples: int,
    plan: BatchPlan,
    carrier: Copying | Reducing,
) -> tuple[list[Results], Packed | None]:
    """A rank's job: its batches one after another; the results, detached, and the sum of their gradients."""
    answers: list[Results] = []
    total: Gradients = []
    tensors = replicas.trained(rank)

    def train(module: nn.Module, piece: Piece) -> tuple[Results, Gradients]:
        piece.arrive()
        walking = partial(replicas.walking, rank)
        return gradients_of(module, piece.batch, plan, piece.samples / samples, tensors, walking)

    for piece in pieces:
        results, found = replicas.call(rank, piece.samples, train, piece)
        total = add_up([total, found]) if total else found
        answers.append(results._replace(loss=move(results.loss, replicas.devices[0])))
    packed = carrier.pack(total, replicas.devices[rank]) if torch.is_grad_enabled() else None
    return answers, packed


def _forward_all(window: Window, plan: BatchPlan, replicas: Replicas) -> Any:
    """All forwards, joined with their graphs: the caller computes the loss."""
    parts = [
        Part(((place, piece.batch), {}), piece.rank, piece.samples, ())
        for place, piece in enumerate(window.pieces)
    ]

    def run(module: nn.Module, part: Part) -> tuple[Any, Traces]:
        place, batch = part.args
        window.pieces[place].arrive()
        return call(module, batch, plan)

    made = call_parts(replicas, parts, run)
    return join(made, [piece.samples for piece in window.pieces], PLAIN)


def _result(answers: Sequence[Results], window: Window) -> WindowResult:
    counts = [piece.samples for piece in window.pieces]
    shares = [count / window.samples for count in counts]
    loss = torch.stack([own.loss * share for own, share in zip(answers, shares, strict=True)]).sum()

    def joined() -> tuple[Any, Traces]:
        # The caller's streams on all devices come after their creation.
        trees = [(answer.output, answer.traces) for answer in answers]
        both: tuple[Any, Traces] = _join(trees, counts, loss.device)
        return both

    return WindowResult(window.samples, loss, joined)


def _join(trees: Sequence[Any], samples: Sequence[int], home: torch.device) -> Any:
    def bring(leaf: Any) -> Any:
        return move(leaf.detach(), home) if isinstance(leaf, Tensor) else leaf

    return join([tree_map(bring, tree) for tree in trees], samples, PLAIN)
