"""Gradient windows: each device works through its own whole batches, and the gradients are summed once.

Forward, loss and backward run batch by batch, so each device has one graph at a time. A batch's loss counts
by its samples in the window: the sum is the gradient of the mean over all of them, as of one big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import accumulate, has_hooks, take_gradients, without_hooks
from flowdp.data.trees import field_of, tensors_of
from flowdp.data_parallel.call_check import Call
from flowdp.data_parallel.gather import PartOutputs, join
from flowdp.data_parallel.layout import PLAIN, Callee
from flowdp.data_parallel.loss_context import BatchPlan, LossContext, Traces
from flowdp.data_parallel.nccl_transfer import Copying, Packed, Reducing
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.scatter import Arguments, CallArguments
from flowdp.data_parallel.sharded_call import Shard, call_sharded
from flowdp.data_parallel.window_step import (
    Results,
    WindowCapture,
    WindowStep,
    call,
    differentiate,
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


def window_call(window: Window, plan: BatchPlan, home: torch.device) -> Call:
    """The processing of a window with a `whole`, as a call for `check_call`."""

    def run(module: nn.Module, part: CallArguments) -> Any:
        output, traces = call(module, part.args[0], plan)
        if plan.loss is None:
            return output
        return {"loss": plan.loss(LossContext(output, part.args[0], last_outputs(traces), traces)).squeeze()}

    sizes = tuple(piece.samples for piece in window.pieces)
    callee = Callee(run)
    callee.name = "the loss of a window" if plan.loss else "the module"
    return Call(callee, run, (window.whole,), {}, sizes, PLAIN, home, ADVICE)


def run_window(
    modules: Sequence[nn.Module],
    window: Window,
    plan: BatchPlan,
    replicas: Replicas | None,
    *,
    sync: bool = True,
    capture: WindowCapture | None = None,
) -> WindowResult:
    """Let every device work through its batches of a window.

    With a loss function the summed gradients are at the user's module when this returns; where gradients
    are switched off, only the losses are computed.

    Without replicas there is one device, whose work is done by the calling thread; without `sync`, gradients
    stay at the ranks.

    Raises:
        FlowdpError: The loss is not a scalar, or depends on nothing that is trained.

    Streams:
        As `Replicas.each`.
    """
    if plan.loss is None:
        return _forward_all(modules, window, plan, replicas, sync)
    of_rank = [[piece for piece in window.pieces if piece.rank == rank] for rank in range(len(modules))]
    if replicas is None:
        train = partial(_train, window.samples, plan, step=None if capture is None else capture.steps[0])
        done: list[tuple[list[Results], Packed | None] | None] = [
            ([train(modules[0], piece) for piece in of_rank[0]], None)
        ]
    else:
        replicas.follow()
        is_summed = sync and torch.is_grad_enabled()
        busy = [bool(own) or (sync and replicas.has_unsummed(rank)) for rank, own in enumerate(of_rank)]
        carrier = replicas.carrier(replicas.trained(0), is_whole=is_summed and all(busy))
        into = carrier if is_summed else None
        jobs = [
            partial(_train_all, replicas, rank, own, window.samples, plan, into, capture) if is_busy else None
            for rank, (own, is_busy) in enumerate(zip(of_rank, busy, strict=True))
        ]
        with replicas.backward(keeps=not sync and bool(of_rank[0])):
            done = replicas.each(jobs, parts=of_rank, enters_draws=capture is None)
            replicas.note()
        if is_summed:
            with replicas.summing.running():
                packed = [answer[1] for answer in done if answer is not None and answer[1] is not None]
                if packed:
                    accumulate(replicas.trained(0), carrier.sum(packed))
    answers = {rank: iter(answer[0]) for rank, answer in enumerate(done) if answer is not None}
    return _result([next(answers[piece.rank]) for piece in window.pieces], window)


def _train_all(
    replicas: Replicas,
    rank: int,
    pieces: Sequence[Piece],
    samples: int,
    plan: BatchPlan,
    into: Copying | Reducing | None,
    capture: WindowCapture | None,
) -> tuple[list[Results], Packed | None]:
    """A rank's job; without `into` gradients stay at the rank."""
    with nullcontext() if capture is None else capture.lock:
        replicas.receive(rank)
        parameters = replicas.trained(rank)
    home = replicas.devices[0]
    step = None if capture is None else capture.steps[rank]
    run = partial(_train, samples, plan, replicas=replicas, step=step)

    def train(piece: Piece) -> Results:
        return replicas.call(rank, piece.samples, run, piece)

    if rank == 0 and not (into and has_hooks(parameters)):
        answers = [train(piece) for piece in pieces]
        # It has them already, but NCCL sums all ranks or none.
        nothing = into.pack([None] * len(parameters), home) if isinstance(into, Reducing) else None
        return answers, nothing
    # Hooks run once, on the sum of all ranks.
    before = take_gradients(parameters) if rank == 0 else []
    with without_hooks(parameters):
        answers = [train(piece) for piece in pieces]
    own = take_gradients(parameters) if into else []
    for parameter, gradient in zip(parameters, before, strict=bool(before)):
        parameter.grad = gradient
    return answers, into.pack(own, replicas.devices[rank]) if into else None


def _train(
    samples: int,
    plan: BatchPlan,
    module: nn.Module,
    piece: Piece,
    *,
    replicas: Replicas | None = None,
    step: WindowStep | None = None,
) -> Results:
    """The results of one batch, detached: the loss on the first device, the rest on its own."""
    piece.arrive()
    factors = Factors(piece.samples / samples, piece.samples)
    if step is None:
        results = differentiate(module, piece.batch, plan, factors, replicas, piece.rank)
    else:
        results = step.run(piece.batch, plan, factors)
    return results if replicas is None else results._replace(loss=move(results.loss, replicas.devices[0]))


def _forward_all(
    modules: Sequence[nn.Module],
    window: Window,
    plan: BatchPlan,
    replicas: Replicas | None,
    sync: bool,
) -> WindowResult:
    """All forwards, joined with their graphs: the caller computes the loss."""
    if replicas is None:
        (piece,) = window.pieces
        piece.arrive()
        both = call(modules[0], piece.batch, plan)
    else:
        shards = [
            Shard(piece.rank, Arguments((place, piece.batch)), 0, piece.samples)
            for place, piece in enumerate(window.pieces)
        ]

        def run(module: nn.Module, part: CallArguments) -> tuple[Any, Traces]:
            place, batch = part.args
            window.pieces[place].arrive()
            return call(module, batch, plan)

        both = call_sharded(replicas, shards, run, sync=sync)
    return WindowResult(window.samples, None, lambda: both)


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
    parts = [PartOutputs(tree, count, home) for tree, count in zip(trees, samples, strict=True)]
    joined = join(parts, [[move(tensor.detach(), home) for tensor in part.tensors] for part in parts])
    return joined.tree(joined.tensors)
