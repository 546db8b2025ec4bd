"""One model, its optimizers and its loss on one device, and their training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import min_part_size, plain_layers
from flowdp.data.batches import Portion, cuts
from flowdp.device.accelerator import device_generator, is_accelerator
from flowdp.device.compiled import frees_at_once
from flowdp.device.draws import OwnDraws
from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.frozen_parameters import FrozenCheck
from flowdp.device.gathered import made
from flowdp.device.streams import Lane
from flowdp.device.torch_modes import Autocast
from flowdp.device.weight_average import WeightAverage
from flowdp.device.worker_context import CurrentWorker, Steps
from flowdp.errors import DataError
from flowdp.graphs.base import Capturable, Computed, Factors, shared
from flowdp.policy.schedule import Recheck
from flowdp.protocol.messages import Checksum, SampleRange
from flowdp.replica.factories import all_of, each_of, tensors_in
from flowdp.replica.flat_optimizer import obstacle
from flowdp.replica.loss import NOT_OURS, RunningLoss, unpack_loss
from flowdp.replica.optimizer_copy import load_state
from flowdp.replica.parts import ReplicaParts
from flowdp.replica.update import Update

__all__ = ["Replica", "whole_batch"]


class Replica(Capturable):
    """Model and optimizers of one rank with their training step: here, a loss and its optimizer.

    A step is `begin`, then `add` for each of its micro-batches, then `step`.

    Args:
        parts: Objects and settings of this rank.
        function: The user's, which a step calls: here, a loss of (module, batch).

    Attributes:
        module, flat, optimizers, learning_rate, lane, width, launching, shares_generator: See `ReplicaParts`.
        function: As given.
        casting: Autocast of forward and loss.
        average: Moving average of the parameters; None: there is none.
        frozen: Check of the frozen parameters; None: they may be written to, or there are none.
        gradients: Gradients as flat memory; None where each parameter has its own, or none.
        update: Clips the gradients and steps the optimizer.
        loss: The loss of the step under way.
        captured: Its captured steps; None: all are eager.
        pieces: Least number of pieces of a micro-batch, since the device has run out of memory.
        least: Samples that a forward must have.
        part: Part of the step under way, where all ranks share one (exact).
        has_stepped: Whether the first micro-batch has been checked.
        may_be_flat: Whether the optimizer may step the flat memory, not parameter by parameter.
        can_repeat: Whether forward and backward of a step can be done once more.
        steps_at_gate: Whether the optimizer steps behind the gate, in `ExactReplica.meet`.

    Threads:
        The worker of this rank, once it runs.
    """

    may_be_flat = True
    can_repeat = True
    steps_at_gate = False

    def __init__(self, parts: ReplicaParts, function: Callable[..., Any]) -> None:
        module, flat, lane = self.module, self.flat, self.lane = parts.module, parts.flat, parts.lane
        self.function = function
        self.optimizers, self.learning_rate = parts.optimizers, parts.learning_rate
        self.casting = Autocast(lane.device, parts.precision, caches=parts.caches_casts)
        self.average = None if parts.ema_decay is None else WeightAverage(flat, module, parts.ema_decay)
        self.frozen = None
        if parts.frozen_remedy is not None and any(
            not parameter.requires_grad for parameter in module.parameters()
        ):
            self.frozen = FrozenCheck(module, parts.frozen_remedy)
        self.width, self.pieces, self.least = parts.width, 1, min_part_size(plain_layers(module))
        self.launching, self.shares_generator = parts.launching, parts.shares_generator
        self._redraws = Recheck()  # where the generator is shared
        self.part: SampleRange | None = None
        self.has_stepped = False
        self.loss = RunningLoss()
        self._start = _Start(flat, lane.device)
        is_flat = self.may_be_flat and obstacle(all_of(parts.optimizers)[0], module, flat) is None
        self.gradients: FlatGradients | None = self._open_gradients(is_flat)
        average = None if self.steps_at_gate else self.average
        self.update = Update(parts, self.gradients, average, is_flat=is_flat)
        self.captured = None if parts.capture is None else parts.capture(self)

    @property
    def device(self) -> torch.device:
        """Device of the rank."""
        return self.lane.device

    @property
    def averaged(self) -> FlatTensors:
        """Flat memory that the ranks average."""
        return self.flat if self.average is None else self.average

    @property
    def watched(self) -> FlatTensors | None:
        """Memory that must stay finite; None: none."""
        return self.flat

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer steps."""
        return self.update.trained

    @property
    def casts(self) -> torch.dtype | None:
        """Type of autocast; None: there is none."""
        return self.casting.dtype

    @property
    def steps(self) -> Steps | None:
        """Operations for a `train_step`; None with a loss."""
        return None

    @property
    def meets(self) -> bool:
        """Whether forwards and backwards are made together with the other ranks (SyncBatchNorm in exact)."""
        return False

    @property
    def has_begun(self) -> bool:
        """See `Capturable`."""
        return self.loss.value is not None

    @property
    def obstacle(self) -> str | None:
        """Why none of its steps can be captured; None: nothing stands in the way."""
        return "its forwards meet those of the other ranks (SyncBatchNorm)" if self.meets else None

    def begin(self, part: SampleRange | None = None) -> None:
        """Begin a step, which `undo` can undo where it can be repeated.

        Args:
            part: Part of it, where all ranks share one (exact).
        """
        self.part = part
        self._start.is_noted = self._start.is_empty

    def mark(self) -> None:
        """Begin another piece of work, which `undo` can undo."""
        self._start.note()

    def undo(self) -> None:
        """Forget forward and backward since the last `begin` or `mark`.

        Streams:
            As `add`.
        """
        self.update.clear()
        self.loss.take()
        self._start.put_back()

    def is_finite(self) -> bool:
        """Whether the memory that must stay finite is so; reads it."""
        return self.watched is None or self.watched.is_finite()

    def add(self, batch: Any, worker: CurrentWorker, share: float = 1.0) -> None:
        """Forward and backward of a micro-batch.

        Args:
            batch: On the device.
            worker: Worker of this step; knows the samples.
            share: Share of its loss in that of the step.

        Raises:
            TypeError: The return value of the loss is not a loss.
            ValueError: The loss is not a scalar.

        Streams:
            All of it is enqueued on the current stream, which is the lane's `compute`, and nothing read back.
        """
        if self.pieces == 1:
            self._compute(batch, worker, Factors(share, worker.samples))
        else:
            self._add_pieces(batch, worker, share)
        if not self.has_stepped:
            self._check_first()

    def step(self, factor: float | Tensor = 1.0) -> Tensor | None:
        """Clip the micro-batches' gradients and step the optimizer.

        Args:
            factor: On loss and gradients, where the shares did not sum to 1.

        Returns:
            The loss over the step's samples, before the step, on the device; the mean by their weights, where
            losses name some. Shape []. None where the user's own step has none.

        Streams:
            As `add`; but optimizers that a gradient scaler has to ask (all not fused) are waited for.
        """
        loss, factor = self.loss.end(factor)
        captured = self.captured
        self.update.step(factor, replays=captured is not None and captured.is_running)
        return loss

    def step_alone(self) -> Tensor | None:
        """See `ExactReplica.step_alone`: elsewhere every step is."""
        return self.step()

    def forwards(self, batch: Any, samples: int) -> int:
        """Number of forwards for a micro-batch of this many samples."""
        if self.pieces == 1 or whole_batch(made(batch), samples) is None:
            return 1
        return max(1, min(self.pieces, samples // self.least))

    @property
    def touched(self) -> bytes:
        """See `ExactReplica.touched`: elsewhere each rank steps by its own gradients."""
        return b""

    def checksum(self) -> Callable[[], Checksum] | None:
        """See `ExactReplica.checksum`: elsewhere the replicas are not compared."""
        return None

    def leave(self) -> None:
        """See `ExactReplica.leave`."""

    @torch.no_grad()
    def copy_from(self, donor: Replica) -> None:
        """Copy another replica: parameters and their average, buffers, optimizers, scale of the loss.

        The learning rate is left alone, and gradients are cleared.

        Threads:
            This rank's worker, while no rank computes.

        Streams:
            On `compute`, behind the donor's; the donor's goes on behind the copies.
        """
        _after(self.lane, donor.lane)
        # Torch orders a copy between two devices with the current streams of both.
        with donor.lane.on(donor.lane.compute), self.lane.on(self.lane.compute):
            for mine, theirs in zip(tensors_in(self.module), tensors_in(donor.module), strict=True):
                mine.copy_(theirs)
            for own, other in zip(all_of(self.optimizers), all_of(donor.optimizers), strict=True):
                load_state(own, other.state_dict(), with_groups=False)
            if self.average is not None and donor.average is not None:
                self.average.copy_from(donor.average)
            self.update.copy_scale(donor.update)
            self.update.clear()
        _after(donor.lane, self.lane)

    def close(self) -> None:
        """Free the graphs of captured steps, which know the replica; there are no more steps.

        Threads:
            Any, once the worker has left.
        """
        self.captured = None
        self.update.close()

    def optimizer_states(self) -> Any:
        """The `state_dict()` of each optimizer, in the form in which the user gave them."""
        return each_of(self.optimizers, lambda optimizer: optimizer.state_dict())

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Have the parameters in the module with which it is evaluated: their moving average, if any."""
        return nullcontext() if self.average is None else self.average.applied()

    def _open_gradients(self, is_flat: bool) -> FlatGradients | None:
        return FlatGradients(self.flat) if is_flat else None

    def _add_pieces(self, batch: Any, worker: CurrentWorker, share: float) -> None:
        batch = made(batch)
        samples, whole = worker.samples, whole_batch(batch, worker.samples)
        for start, stop in cuts(samples, self.forwards(batch, samples)):
            worker.samples = stop - start
            factors = Factors(share * worker.samples / samples, worker.samples)
            self._compute(batch if whole is None else whole.rows(start, stop), worker, factors)
        worker.samples = samples

    def _compute(self, batch: Any, worker: CurrentWorker, factors: Factors) -> None:
        """Forward and backward of a micro-batch, or a piece of one: by a recorded graph, or eagerly."""
        computed = None
        if self.captured is not None:
            if factors.share != 1.0 and self.can_repeat and not self._start.is_noted:
                self._start.note()  # a later one of the step may be eager
            computed = self.captured.run(batch, worker, factors)
        if computed is None:
            computed = self.compute(made(batch), worker, factors)
        self.loss.add(computed, factors.share)

    def compute(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed:
        """Forward and backward by the user's loss; see `add`."""
        if self.can_repeat and not self._start.is_noted:
            self._start.note()
        if self.gradients is not None:
            self.gradients.begin()
        options = {}
        if self.launching is None:
            loss, weight = self.forward(batch, worker, factors.share, factors.of)
        else:
            with self.launching:
                loss, weight = self.forward(batch, worker, factors.share, factors.of)
            options = {"retain_graph": True} if frees_at_once(self.device) else {}
        self._differentiate(self.scale(loss), **options)
        return Computed(loss.detach(), weight)

    def forward(
        self, batch: Any, worker: CurrentWorker, share: float | Tensor, of: int
    ) -> tuple[Tensor, Tensor | None]:
        """Forward of a micro-batch; see `Capturable.forward`.

        Raises:
            ValueError: The loss, or the weight that it names, is not one number.
        """
        if self.casting.dtype is None:
            result = self.function(self.module, batch)
        else:
            with self.casting():
                result = self.function(self.module, batch)
        loss, named, scalars = unpack_loss(result)
        for name, value in scalars.items():
            worker.record(name, value)
        if loss.dim() != 0:
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss must be a scalar, the mean over the batch, not a tensor of shape "
                    f"{tuple(loss.shape)}; add .mean()"
                )
            loss = loss.squeeze()
        if not loss.requires_grad:
            raise ValueError(NOT_OURS)
        if named is None:
            if isinstance(share, Tensor):
                return shared(loss, share), None
            return (loss if share == 1.0 else loss * share), None
        weight = torch.as_tensor(named, dtype=torch.float64, device=self.device).detach()
        if weight.numel() != 1:
            raise ValueError(f"the weight of the loss must be one number, not of shape {tuple(weight.shape)}")
        weight = weight.reshape(()) * share / of
        # The mean over nothing is NaN, and would stay so times 0.
        return torch.where(weight > 0, loss, 0.0) * weight, weight

    def scale(self, loss: Tensor) -> Tensor:
        """A loss as its backward begins, scaled in "fp16"."""
        scaler = self.update.scaler
        return loss if scaler is None else scaler.scale(loss)

    def _differentiate(self, loss: Tensor, **options: Any) -> None:
        if not self.shares_generator:
            loss.backward(**options)
            return
        with OwnDraws() if self._redraws.is_due else nullcontext():
            loss.backward(**options)
        self._redraws.passed()

    def _check_first(self) -> None:
        """Check once for mistakes that would otherwise go unnoticed."""
        self._check_gradients()
        self.flat.check_registered()
        self.has_stepped = True

    def _check_gradients(self) -> None:
        """Check that a parameter has a gradient: a loss on another model, the user's own, trains nothing."""
        if self.gradients is None:
            is_touched = any(parameter.grad is not None for parameter in self.trained)
        else:
            is_touched = self.gradients.is_touched
        if not is_touched:
            raise ValueError(NOT_OURS)


class _Start:
    """The state from which forward and backward of a step are repeated: buffers, and a card's generator.

    It is noted when the step first runs eagerly: a captured one is not repeated.

    Attributes:
        is_empty: Whether there is nothing to note.
        is_noted: Whether it is that of the step, or other work, under way.
    """

    def __init__(self, flat: FlatReplica, device: torch.device) -> None:
        self._flat = flat if flat.has_buffers else None
        self._generator = device_generator(device) if is_accelerator(device) else None
        self.is_empty = self.is_noted = self._flat is None and self._generator is None
        self._random: Tensor | None = None  # state of the generator

    def note(self) -> None:
        self.is_noted = True
        if self._flat is not None:
            self._flat.keep_buffers()
        if self._generator is not None:
            self._random = self._generator.get_state()

    def put_back(self) -> None:
        if not self.is_noted:
            return
        if self._flat is not None:
            self._flat.put_back_buffers()
        if self._generator is not None and self._random is not None:
            self._generator.set_state(self._random)


def whole_batch(batch: Any, samples: int) -> Portion | None:
    """A micro-batch as something to cut; None where it cannot be."""
    try:
        return Portion.of(batch, samples)
    except DataError:
        return None


def _after(lane: Lane, other: Lane) -> None:
    """Let the compute stream of one rank wait for that of another."""
    mark = other.event()
    mark.record(other.compute)
    lane.compute.wait_event(mark)
