"""Forward and backward of a rank on CUDA as a graph: one launch, which holds no interpreter lock.

A graph reads and writes fixed memory: the parameters and buffers, which lie in the replica's flat memory; the
gradients, in flat memory where the optimizer steps it, else in memory of this module; inputs of its own, into
which a micro-batch is copied on `compute` by one call; and the numbers that change from one micro-batch to
the next, as scalars on the device. So the ring of prefetched batches works as before: `ready` is awaited
before the copy, `free` is recorded behind the step.

The optimizer is not in the graph. Its step on flat memory is a handful of launches, its rate stays a number
of Python, and under policy="exact" the mean lies in between, which no graph may hold: NCCL may deadlock.

Random numbers are torch's: a replay takes them from where the device's generator stands and moves it on, as
the eager step does, and the state can be read and put back between two replays.

Nothing of this module has run on a GPU yet.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import give_gradients
from flowdp.data.trees import tree_map
from flowdp.device.accelerator import device_generator, untried
from flowdp.device.cuda_graphs import Graph, GraphPool
from flowdp.device.draws import DrawsNoted
from flowdp.device.streams import CudaLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.device.writes import WritesNoted
from flowdp.graphs.base import Capturable, Computed, Factors, NotCaptured, Outputs, TrialStep, watching

__all__ = ["BOUND", "HALF_BOUND", "CudaGraphs", "CudaStepGraph"]

BOUND, HALF_BOUND = 1e-3, 3e-2
"""Differences between a captured and an eager step, relative to the largest value, where kernels may add in
another order from one launch to the next (atomics); in half precision more."""

_SHARED = (
    "it draws random numbers, and several ranks share the generator of their device: two graphs could take "
    "the same numbers; give each device one rank, or take the dropout out"
)

_grad = attrgetter("grad")
_LIBRARIES = str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[1])


class CudaGraphs:
    """Makes the graphs of one rank on CUDA; a `Recorder`.

    Args:
        step: Forward and backward to capture; its lane is a CUDA device's.
        others: Modules that the loss holds.

    Attributes:
        bound: See `Recorder`. Zero where torch was told to use deterministic algorithms.

    Threads:
        The rank's.
    """

    def __init__(self, step: Capturable, others: Sequence[nn.Module] = ()) -> None:
        assert isinstance(step.lane, CudaLane)
        self.bound = BOUND if step.casts is None else HALF_BOUND
        if torch.are_deterministic_algorithms_enabled():
            self.bound = 0.0
        self._step = step
        self._modules = nn.ModuleList([step.module, *others])
        self._lane = step.lane
        self._pool: GraphPool | None = None
        self._gradients: dict[Tensor, Tensor] = {}

    def record(
        self, batch: Any, leaves: Sequence[Tensor], worker: CurrentWorker | None, factors: Factors
    ) -> CudaStepGraph:
        """Capture forward and backward of micro-batches like this one; see `Recorder.record`.

        They run once more eagerly for that, in the same memory, and all that they change is put back.

        Raises:
            NotCaptured: See `Recorder.record`; nothing is left of the attempt.
        """
        self._check(leaves)
        graph = CudaStepGraph(self._step, leaves, self._modules)
        with self._rehearsing():
            refusal = graph.rehearse(batch, leaves, worker, factors)
            if refusal is None and graph.draws and self._step.shares_generator:
                refusal = _SHARED
            if refusal is None:
                if self._pool is None:
                    self._pool = GraphPool(self._lane)
                refusal = graph.capture(self._pool, worker)
        if refusal is not None:
            raise NotCaptured(refusal)
        return graph

    def forget(self) -> None:
        """Free all graphs and their own memory; see `Recorder.forget`."""
        if self._pool is not None:
            self._pool.clear()
        self._pool = None
        self._gradients.clear()

    def _check(self, leaves: Sequence[Tensor]) -> None:
        if (obstacle := self._step.obstacle) is not None:
            raise NotCaptured(obstacle)
        if (platform := untried(self._lane.device.type)) is not None:
            raise NotCaptured(
                f"steps on devices are captured by CUDA's graphs, and this one is of {platform}"
            )
        for leaf in leaves:
            if leaf.device != self._lane.device or leaf.layout is not torch.strided:
                raise NotCaptured(
                    f"a tensor of the batch, {leaf.layout} on {leaf.device}, does not lie densely on "
                    f"{self._lane.device}"
                )
        for name, module in self._step.module.named_modules():
            if getattr(module, "sparse", False) is True:
                raise NotCaptured(f"{name or 'the model'} has sparse gradients, which have no fixed memory")

    @contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """Context in which gradients are added where they stay for good; its end restores everything.

        But for a generator that other ranks draw from: they would draw the same numbers again.
        """
        step, own = self._step, self._gradients
        trained = step.trained
        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            if parameter not in own:
                mine = parameter.grad if step.has_flat_gradients else None
                own[parameter] = torch.zeros_like(parameter.data) if mine is None else mine
            parameter.grad = own[parameter]
        modules = self._modules  # a forward may write to parameters, too: max_norm, a teacher's average
        places = [*(own[one] for one in trained), *modules.buffers(), *modules.parameters()]
        kept = [place.clone() for place in places]
        generator = device_generator(self._lane.device)
        random = None if step.shares_generator else generator.get_state()
        try:
            yield
        finally:
            for place, value in zip(places, kept, strict=True):
                place.data.copy_(value)  # and no version tells of it: no gradient was touched
            for parameter, gradient in zip(trained, before, strict=True):
                parameter.grad = gradient
            if random is not None:
                generator.set_state(random)


class CudaStepGraph:
    """A CUDA graph of forward and backward of micro-batches of one form; a `StepGraph`.

    Args:
        step: Forward and backward to capture.
        leaves: The tensors of such a micro-batch.
        modules: All that the step reads: the rank's, and those that the loss holds.

    """

    def __init__(self, step: Capturable, leaves: Sequence[Tensor], modules: nn.Module) -> None:
        self._batch: Any = None  # of the inputs
        self.records: Sequence[tuple[str, float]] = ()
        self.draws = False
        self._step = step
        self._modules = modules
        self._device = step.lane.device
        self._graph: Graph | None = None
        self._inputs = [leaf.clone() for leaf in leaves]
        self._factors: Factors | None = None  # as they are on the device
        self._share, self._of = torch.zeros(2, dtype=torch.float64, device=self._device).unbind()
        self._parameters: list[Tensor] = []  # that have a part in the loss
        self._gradients: list[Tensor] = []  # of them
        self._written: list[Tensor] = []  # buffers, and parameters that a forward writes to
        self._results: list[Tensor] = []  # the loss; its weight, if it names one; the scalars
        self._stacked: Tensor | None = None  # all of them, where they are of one dtype
        self._made: list[Tensor] = []  # further results
        self._outputs: Outputs | None = None  # the tree that they make
        self._has_weight = False

    def rehearse(
        self, batch: Any, leaves: Sequence[Tensor], worker: CurrentWorker | None, factors: Factors
    ) -> str | None:
        """Run it eagerly once, as it will be captured; the parameters' gradients lie where they stay.

        So every kernel has been loaded, tuned and given its memory, and the tensors that the step touches are
        known before anything is captured: below torch 2.13, other ranks of the card could not draw beside a
        capture.

        Returns:
            The reason why it cannot be captured; None: it can, so far.
        """
        trained, modules = self._step.trained, self._modules
        twins = {id(leaf): own for leaf, own in zip(leaves, self._inputs, strict=True)}
        self._batch = tree_map(lambda leaf: twins.get(id(leaf), leaf), batch)
        self._put(factors)
        versions = [_owned(parameter)._version for parameter in trained]
        before = [(parameter, parameter._version) for parameter in modules.parameters()]
        known = [*modules.buffers(), *modules.parameters(), *map(_owned, trained), *self._inputs]
        with DrawsNoted() as noted, WritesNoted(known) as writes:
            refusal = self._attempt(lambda: self._compute(worker))
        writes.undo()
        if refusal is None and writes.found:
            refusal = (
                f"it writes to a tensor of {writes.found[0].numel()} numbers that no module holds, which a "
                "recorded step would do twice: register it as a buffer"
            )
        self.draws = noted.has_drawn
        for parameter, version in zip(trained, versions, strict=True):
            gradient = _owned(parameter)
            if gradient._version != version:
                self._parameters.append(parameter)
                self._gradients.append(gradient)
        self._written += [*modules.buffers(), *(one for one, version in before if one._version != version)]
        return refusal

    def capture(self, pool: GraphPool, worker: CurrentWorker | None) -> str | None:
        """Capture it, after `rehearse`; returns the reason why it cannot be captured, as that does."""

        def captured() -> None:
            self._graph = pool.capture(lambda: self._compute(worker))

        return self._attempt(captured)

    def run(
        self,
        leaves: Sequence[Tensor],
        factors: Factors,
        _generator: torch.Generator | None,  # a card has one, which is the default
    ) -> Computed:
        """See `StepGraph.run`."""
        assert self._graph is not None
        gives = self._step.gives_gradients
        if gives:
            torch._foreach_zero_(self._gradients)
        else:
            self._attach()
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(leaves))
        self._put(factors)
        self._graph.replay()
        if gives:
            # Copies, by a few launches for all: the graph writes to its own again.
            give_gradients(self._parameters, torch._foreach_mul(self._gradients, 1.0))
            # The replicas are sent the tensors that torch has seen written.
            torch.autograd.graph.increment_version(self._written)
        else:
            # A search for the parameters that a backward has touched looks at the versions.
            torch.autograd.graph.increment_version(self._gradients)
        if self._stacked is not None:
            loss, *others = self._stacked.clone().unbind()
        else:
            loss, *others = (result.clone() for result in self._results)
        outputs = None if self._outputs is None else self._outputs.of([one.clone() for one in self._made])
        return Computed(loss, others.pop(0) if self._has_weight else None, others, outputs)

    def trial(
        self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None
    ) -> TrialStep:
        """See `StepGraph.trial`."""
        trained, buffers = self._step.trained, list(self._step.module.buffers())
        before = [parameter.grad for parameter in trained]
        kept = [None if gradient is None else gradient.clone() for gradient in before]
        kept_others = [tensor.detach().clone() for tensor in self._written]
        try:
            computed = self.run(leaves, factors, generator)
            gradients = [None if p.grad is None else p.grad.clone() for p in trained]
            touched = [any(parameter is one for one in self._parameters) for parameter in trained]
            return TrialStep(computed, gradients, [buffer.clone() for buffer in buffers], touched)
        finally:
            for parameter, gradient, value in zip(trained, before, kept, strict=True):
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.data.copy_(value)  # see `_rehearsing`
            for tensor, value in zip(self._written, kept_others, strict=True):
                tensor.data.copy_(value)

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Run work with the user's code; returns the reason why a step with it is not captured."""
        try:
            work()
        except NotCaptured as refusal:
            return str(refusal)
        except Exception as error:
            return _reason(error)
        return None

    def _compute(self, worker: CurrentWorker | None) -> None:
        """Forward and backward of the inputs, as they are captured."""
        # Under a caller's autocast, casts of parameters may lie there from before, and would stay.
        torch.clear_autocast_cache()
        with torch.autograd.set_multithreading_enabled(False):
            with watching(worker) as seen:
                passed = self._step.forward(self._batch, worker, self._share, self._of)
            self.records, scalars = seen.records, seen.values
            loss, weight = passed.loss, passed.weight
            self._step.scale(loss).backward()
        torch.clear_autocast_cache()
        made, self._outputs = Outputs.opened(passed.outputs)
        self._made = [one.detach() for one in made]
        elsewhere = [one.device for one in (*scalars, *made) if one.device != self._device]
        if elsewhere:
            raise NotCaptured(
                f"it records or returns a tensor that lies on {elsewhere[0]}, which a captured step would "
                "repeat as it is: let it be one of the device"
            )
        results = [loss.detach(), *(() if weight is None else (weight,)), *scalars]
        self._has_weight = weight is not None
        self._results = [result.reshape(()) for result in results]
        if len({result.dtype for result in results}) == 1:
            self._stacked = torch.stack(self._results)

    def _attach(self) -> None:
        """Move the gradients to where the graph adds to them, with the sums of eager micro-batches."""
        if all(map(is_, map(_grad, self._parameters), self._gradients)):
            return
        fresh: list[Tensor] = []
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                fresh.append(own)
            elif parameter.grad is not own:
                own.copy_(parameter.grad)
            parameter.grad = own
        if fresh:
            torch._foreach_zero_(fresh)

    def _put(self, factors: Factors) -> None:
        if factors != self._factors:
            self._share.fill_(factors.share)
            self._of.fill_(factors.of)
            self._factors = factors


def _owned(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _reason(error: Exception) -> str:
    """An error as a sentence, with the place in the user's code; it does not keep the error's frames."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        text = "the device has no room for a second set of activations beside those of eager steps"
    elif "captur" in text:
        text += ". A captured step may not read a value on the host (.item(), print, if), nor copy from there"
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text
