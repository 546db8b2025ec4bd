"""Forward and backward of a rank on CUDA as a graph: one launch, which holds no interpreter lock.

A graph reads and writes fixed memory: the parameters and buffers, which lie in the replica's flat memory; the
gradients, in flat memory where the optimizer steps it, else in memory of this module; and inputs of its own,
into which a micro-batch is copied on `compute` by one call. Of a dataset that lies on the device the input is
the index, and the graph gathers the batch. So the ring of prefetched batches works as before: `ready` is
awaited before the copy, `free` is recorded behind the step.

Inside of it the parameters have no gradients when backward begins, so autograd puts them where it likes, and
one call brings all of them to where they stay: it writes the first ones of a step, and adds later ones.

The optimizer is in a graph of its own, `CapturedUpdate`: under policy="exact" the mean lies in between, which
no graph may hold, for NCCL may deadlock.

Random numbers are torch's: a replay takes them from where the device's generator stands and moves it on, as
the eager step does, and the state can be read and put back between two replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from flowdp.device.accelerator import device_generator
from flowdp.device.cuda_graphs import Graph, GraphPool
from flowdp.device.gathered import Gathered
from flowdp.device.streams import StreamLane
from flowdp.device.trees import tree_map
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.base import Capturable, Computed, Factors, NotCaptured, TrialStep, watching
from flowdp.graphs.trials import bound_of, refusal_of, without_trace

__all__ = ["CudaGraphs", "CudaStepGraph"]

_SHARED = (
    "it draws random numbers, and several ranks share the generator of their device: two graphs could take "
    "the same numbers; give each device one rank, or take the dropout out"
)

_grad = attrgetter("grad")


class CudaGraphs:
    """Makes the graphs of one rank on CUDA.

    Args:
        step: Forward and backward to capture; its lane is a CUDA device's.

    Attributes:
        bound: Largest difference between a captured step and an eager one, relative to the largest value of
            the compared tensor. Zero where torch was told to use deterministic algorithms.

    Threads:
        The rank's.
    """

    def __init__(self, step: Capturable) -> None:
        assert isinstance(step.lane, StreamLane)
        self.bound = bound_of(is_half=step.casts is not None)
        self._step = step
        self._lane = step.lane
        self._pool: GraphPool | None = None
        self._places: dict[int, Tensor] = {}

    def record(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker,
        factors: Factors,
        state: Sequence[Tensor],
    ) -> CudaStepGraph:
        """Capture forward and backward of micro-batches like this one; state of the rank is left as it was.

        They run once more eagerly for that, in the same memory, and all that they change is put back.

        Args:
            batch: The micro-batch.
            leaves: Its tensors; the index of a `Gathered` one.
            worker: Worker of this step.
            factors: Factors of the micro-batch.
            state: Tensors that the step may write to.

        Raises:
            NotCaptured: It cannot be captured; nothing is left of the attempt.
        """
        self._check(leaves)
        # A forward may write to parameters, too: max_norm, a teacher's average.
        graph = CudaStepGraph(self._step, leaves, state, self._gradient_places())
        changed = [*graph.places, *graph.state]
        generator = None if self._step.shares_generator else device_generator(self._lane.device)
        with without_trace(changed, generator), _unnoticed(self._step):
            refusal = graph.rehearse(batch, leaves, worker, factors)
            if refusal is None and graph.draws and self._step.shares_generator:
                refusal = _SHARED
            if refusal is None:
                if self._pool is None:
                    self._pool = GraphPool(self._lane)
                refusal = graph.capture(self._pool, worker, factors)
        if refusal is not None:
            raise NotCaptured(refusal)
        return graph

    def forget(self) -> None:
        """Free the graphs and their memory: something that they depend on has changed."""
        if self._pool is not None:
            self._pool.clear()
        self._pool = None
        self._places.clear()

    def _check(self, leaves: Sequence[Tensor]) -> None:
        if (obstacle := self._step.obstacle) is not None:
            raise NotCaptured(obstacle)
        for leaf in leaves:
            if leaf.device != self._lane.device:
                raise NotCaptured(
                    f"a tensor of the batch on {leaf.device} does not lie on {self._lane.device}"
                )
        known = set(map(id, self._step.trained))
        for name, parameter in self._step.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise NotCaptured(f"{name!r}, which was frozen when the run began, is trained now")

    def _gradient_places(self) -> list[Tensor]:
        """The memory of each trained parameter's gradient, the same for all graphs."""
        step, places = self._step, self._places
        if step.gradients is not None:
            flat = zip(step.gradients.parameters, step.gradients.views, strict=True)
            places.update((id(parameter), view) for parameter, view in flat)
        for parameter in step.trained:
            if id(parameter) not in places:
                places[id(parameter)] = torch.zeros_like(parameter.detach())
        return [places[id(parameter)] for parameter in step.trained]


class CudaStepGraph:
    """A CUDA graph of forward and backward of micro-batches of one form.

    Args:
        step: Forward and backward to capture.
        leaves: The tensors of such a micro-batch.
        state: Tensors that the step may write to beside its gradients.
        places: Memory of each trained parameter's gradient.

    Attributes:
        places: As given.
        state: As given.
        records: Name and weight of each recorded scalar.
        draws: Whether it draws random numbers.
    """

    def __init__(
        self, step: Capturable, leaves: Sequence[Tensor], state: Sequence[Tensor], places: Sequence[Tensor]
    ) -> None:
        self.places, self.state = places, state
        self.records: Sequence[tuple[str, float]] = ()
        self.draws = False
        self._batch: Any = None  # of the inputs
        self._step = step
        self._graph: Graph | None = None
        self._inputs = [leaf.clone() for leaf in leaves]
        self._adds = step.has_begun
        self._share: float | None = None  # as it is on the device
        self._shares = torch.zeros((), dtype=torch.float64, device=step.lane.device)
        self._touched: list[bool] = []  # flag of each trained parameter: it has a part in the loss
        self._parameters: list[Tensor] = []  # these parameters
        self._gradients: list[Tensor] = []  # the places of their gradients
        self._results: list[Tensor] = []  # the loss; its weight, if it names one; the scalars
        self._has_weight = False

    def rehearse(
        self, batch: Any, leaves: Sequence[Tensor], worker: CurrentWorker, factors: Factors
    ) -> str | None:
        """Run it eagerly once, as it will be captured.

        So every kernel has been loaded, tuned and given its memory, and the tensors that the step touches are
        known before anything is captured: below torch 2.13, other ranks of the card could not draw beside a
        capture.

        Returns:
            The reason why it cannot be captured; None: it can, so far.
        """
        if isinstance(batch, Gathered):
            self._batch = Gathered(self._inputs[0], batch.make, batch.samples)
        else:
            twins = {id(leaf): own for leaf, own in zip(leaves, self._inputs, strict=True)}
            self._batch = tree_map(lambda leaf: twins.get(id(leaf), leaf), batch)
        self._put(factors)
        generator = device_generator(self._step.lane.device)
        before = generator.get_state()
        refusal = refusal_of(lambda: self._compute(worker, factors))
        self.draws = not torch.equal(before, generator.get_state())
        trained, touched = self._step.trained, self._touched
        self._parameters = [
            parameter for parameter, is_there in zip(trained, touched, strict=False) if is_there
        ]
        self._gradients = [place for place, is_there in zip(self.places, touched, strict=False) if is_there]
        return refusal

    def capture(self, pool: GraphPool, worker: CurrentWorker, factors: Factors) -> str | None:
        """Capture it, after `rehearse`; returns the reason why it cannot be captured, as that does."""

        def captured() -> None:
            self._graph = pool.capture(lambda: self._compute(worker, factors))

        return refusal_of(captured)

    def run(self, leaves: Sequence[Tensor], factors: Factors) -> Computed:
        """Write or add to the parameters' gradients, and update the buffers in place.

        Args:
            leaves: The tensors of the micro-batch, in the order of its tree.
            factors: Factors of the micro-batch.

        Streams:
            On the lane's `compute`, which is the current one; nothing is read back.
        """
        assert self._graph is not None
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(leaves))
        self._put(factors)
        flat = self._step.gradients
        if self._adds:
            self._bring_in()
        self._graph.replay()
        if flat is not None:
            flat.wrote(self._gradients)
        if not self._adds:
            self._give()
        # A later micro-batch of the step writes over them.
        made = self._results if factors.share == 1.0 else [result.clone() for result in self._results]
        loss, *others = made
        return Computed(loss, others.pop(0) if self._has_weight else None, others)

    def trial(self, leaves: Sequence[Tensor], factors: Factors) -> TrialStep:
        """Run without effect: gradients and buffers are as before when it returns. Arguments as of `run`.

        The caller puts the generator back.
        """
        trained, buffers = self._step.trained, list(self._step.module.buffers())
        before = [parameter.grad for parameter in trained]
        with without_trace([*self.places, *self.state], None), _unnoticed(self._step):
            try:
                computed = self.run(leaves, factors)
                gradients = [
                    place.clone() if is_there or parameter.grad is place else None
                    for parameter, place, is_there in zip(trained, self.places, self._touched, strict=True)
                ]
                return TrialStep(computed, gradients, [buffer.clone() for buffer in buffers], self._touched)
            finally:
                for parameter, gradient in zip(trained, before, strict=True):
                    parameter.grad = gradient

    def _compute(self, worker: CurrentWorker, factors: Factors) -> None:
        """Forward and backward of the inputs, as they are captured."""
        trained = self._step.trained
        before = [parameter.grad for parameter in trained]
        share = 1.0 if factors.share == 1.0 else self._shares
        # Under a caller's autocast, casts of parameters may lie there from before, and would stay.
        torch.clear_autocast_cache()
        try:
            for parameter in trained:
                parameter.grad = None
            batch = self._batch.batch if isinstance(self._batch, Gathered) else self._batch
            with torch.autograd.set_multithreading_enabled(False):
                with watching(worker) as seen:
                    loss, weight = self._step.forward(batch, worker, share, factors.of)
                self._step.scale(loss).backward()
            self._touched = [parameter.grad is not None for parameter in trained]
            if any(
                parameter.grad is not None and parameter.grad.layout is not torch.strided
                for parameter in trained
            ):
                raise NotCaptured("it has sparse gradients, which have no fixed memory")
            self._collect([parameter.grad for parameter in trained])
        finally:
            for parameter, gradient in zip(trained, before, strict=True):
                parameter.grad = gradient
        torch.clear_autocast_cache()
        device = self._step.lane.device
        elsewhere = [one.device for one in seen.values if one.device != device]
        if elsewhere:
            raise NotCaptured(
                f"it records a tensor that lies on {elsewhere[0]}, which a captured step would repeat as it "
                "is: let it be one of the device"
            )
        self.records = seen.records
        self._has_weight = weight is not None
        # Copies of the scalars: one may be a buffer, which is written to behind it.
        results = (loss.detach(), weight, *(value.clone() for value in seen.values))
        self._results = [result.reshape(()) for result in results if result is not None]

    def _collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Bring gradients to their places."""
        pairs = [(p, g) for p, g in zip(self.places, gradients, strict=True) if g is not None]
        if pairs:
            places, found = map(list, zip(*pairs, strict=True))
            (torch._foreach_add_ if self._adds else torch._foreach_copy_)(places, found)
        rest = [p for p, g in zip(self.places, gradients, strict=True) if g is None]
        if rest and not self._adds:
            torch._foreach_zero_(rest)

    def _bring_in(self) -> None:
        """Have the sums of earlier micro-batches in the places where the graph adds to them."""
        if all(map(is_, map(_grad, self._parameters), self._gradients)):
            return
        fresh: list[Tensor] = []
        for parameter, place in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                fresh.append(place)
            elif parameter.grad is not place:
                place.copy_(parameter.grad)
            parameter.grad = place
        if fresh:
            torch._foreach_zero_(fresh)

    def _give(self) -> None:
        """Let the parameters have the gradients that the graph has written."""
        if not all(map(is_, map(_grad, self._parameters), self._gradients)):
            for parameter, place in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = place

    def _put(self, factors: Factors) -> None:
        if factors.share not in (1.0, self._share):
            self._shares.fill_(factors.share)
            self._share = factors.share


def _unnoticed(step: Capturable) -> AbstractContextManager[None]:
    return nullcontext() if step.gradients is None else step.gradients.unnoticed()
