"""One model, its optimizers and its loss on one device, and their training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from threading import Semaphore
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.collective.batch_norm import min_part_size, plain_layers
from flowdp.data.batches import Portion, cuts
from flowdp.device.accelerator import device_generator, is_accelerator
from flowdp.device.compiled import frees_at_once, uses_compile
from flowdp.device.draws import OwnDraws
from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.frozen_parameters import FrozenCheck
from flowdp.device.gathered import made
from flowdp.device.streams import Lane, StreamLane
from flowdp.device.weight_average import WeightAverage
from flowdp.device.worker_context import CurrentWorker, Steps
from flowdp.errors import DataError
from flowdp.graphs.base import Capturable, Computed, Factors, shared
from flowdp.graphs.captured_step import Captured
from flowdp.options import Precision
from flowdp.policy.schedule import Recheck
from flowdp.protocol.messages import Checksum, Outcome, SampleRange
from flowdp.replica.captured_update import CapturedUpdate
from flowdp.replica.factories import Optimizers, all_of, each_of
from flowdp.replica.flat_optimizer import FlatOptimizer, obstacle
from flowdp.replica.learning_rate import LearningRate
from flowdp.replica.optimizer_state import load_state

__all__ = [
    "AUTOCAST",
    "Capture",
    "Loss",
    "LossOption",
    "Replica",
    "ReplicaParts",
    "casting",
    "loss_function",
    "unpack_loss",
    "whole_batch",
]

LossOption = Callable[..., Any] | nn.Module
Loss = Callable[[nn.Module, Any], Any]
Capture = Callable[[Capturable], Captured]
"""Makes the captured steps of a replica."""

AUTOCAST: Mapping[Precision, torch.dtype | None] = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of autocast for each precision; None: there is none."""

NOT_OURS = "the loss does not depend on a parameter of the replica: use the model that is passed in"


def loss_function(loss: LossOption, device: torch.device) -> Loss:
    """The loss as a function of (module, batch); a criterion is copied to the device."""
    if not isinstance(loss, nn.Module):
        return loss
    criterion = copy.deepcopy(loss).to(device)

    def apply(model: nn.Module, batch: Any) -> Any:
        # Not by trying: a tensor of two samples can be taken apart, too.
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"a criterion is called as criterion(model(x), y) and needs batches of two parts, not "
                f"{type(batch).__name__}; give a function instead: loss=lambda model, batch: ..."
            )
        inputs, target = batch
        return criterion(model(inputs), target)

    return apply


@dataclass(frozen=True, kw_only=True)
class ReplicaParts:
    """Objects and settings that every kind of replica is made of.

    Attributes:
        module: Model on its device, flattened.
        flat: Flat memory of the module.
        optimizers: Optimizers of its parameters.
        learning_rate: Sets the optimizers' rates.
        lane: Lane of the device where all of it lies.
        precision: "bf16" and "fp16" run forward and loss under autocast, "fp16" with a scaled loss.
        max_grad_norm: Gradients are clipped to this 2-norm between backward and step; None: not.
        max_grad_value: Each element of the gradients is clipped to this absolute value; None: not.
        width: Batches of the source in a micro-batch.
        caches_casts: Whether autocast casts a weight that is used twice only once. Torch's cache of casts is
            the process's, and each rank that leaves autocast empties it: of several ranks none has it, or
            the rounding of their gradients would be a matter of chance.
        shares_generator: Whether other ranks draw from the device's generator, too.
        launching: Held during the loss, where only some ranks may be in theirs at once; None: all may.
        capture: Makes the captured steps of the replica; None: they run eagerly.
        ema_decay: Part of the parameters' moving average that stays in a step; None: there is no average.
        frozen_remedy: Remedy for writes to frozen parameters, for the error; None: they are allowed.
    """

    module: nn.Module
    flat: FlatReplica
    optimizers: Optimizers
    learning_rate: LearningRate
    lane: Lane
    precision: Precision = "32"
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    width: int = 1
    caches_casts: bool = True
    shares_generator: bool = False
    launching: Semaphore | None = None
    capture: Capture | None = None
    ema_decay: float | None = None
    frozen_remedy: str | None = None


class Replica(Capturable):
    """Model and optimizers of one rank with their training step: here, a loss and its optimizer.

    A step is `add` for each of its micro-batches, then `step`; after each meeting of the ranks comes `meet`.

    Args:
        parts: Objects and settings of this rank.
        function: The user's, which a step calls: here, a loss of (module, batch).

    Attributes:
        averaged: Flat memory that the ranks average.
        average: Moving average of the parameters; None: there is none.
        watched: Memory that must stay finite; None: none.
        frozen: Check of the frozen parameters; None: they may be written to, or there are none.
        pieces: Least number of pieces of a micro-batch, since the device has run out of memory.
        least: Samples that a forward must have.
        meets: Whether forwards and backwards are made together with the other ranks (SyncBatchNorm in exact).
        part: Part of the step, where all ranks share one (exact).
        optimizer: The only optimizer, or the first one.
        casts: Type of autocast; None: there is none.
        trained: The parameters that the optimizer steps.
        has_stepped: Whether the first micro-batch has been checked.
        is_compiled: Whether functions of torch.compile have a part in it.
        captured: Its captured steps; None: all are eager.
        gradients: Gradients as flat memory; None where each parameter has its own, or none.
        steps_at_gate: Whether the optimizer steps behind the gate, in `meet` (exact).
        may_be_flat: Whether the optimizer may step the flat memory, not parameter by parameter.
        steps_flat: Whether it does.
        can_repeat: Whether forward and backward of a step can be done once more.
        steps: Operations for a `train_step`; None with a loss.
        loss_weight: Weight of the last step's loss, per sample, where losses name one. Shape [].
        left_out: A step since the last meeting was not taken, for its gradient is not finite (exact).

    Threads:
        The worker of this rank, once it runs.
    """

    averaged: FlatTensors
    average: WeightAverage | None = None
    watched: FlatTensors | None
    frozen: FrozenCheck | None
    can_repeat = True
    steps: Steps | None = None
    loss_weight: Tensor | None = None
    meets = False
    part: SampleRange | None = None
    gradients: FlatGradients | None = None
    may_be_flat = True
    steps_at_gate = False
    left_out = False

    def __init__(self, parts: ReplicaParts, function: Callable[..., Any]) -> None:
        module, flat = self.module, self.flat = parts.module, parts.flat
        self.function = function
        self.averaged = self.watched = flat
        if parts.ema_decay is not None:
            self.averaged = self.average = WeightAverage(flat, module, parts.ema_decay)
        self.frozen = None
        if parts.frozen_remedy is not None and any(
            not parameter.requires_grad for parameter in module.parameters()
        ):
            self.frozen = FrozenCheck(module, parts.frozen_remedy)
        self.width = parts.width
        self.optimizers = parts.optimizers
        self.learning_rate = parts.learning_rate
        self.lane = parts.lane
        self.device = parts.lane.device
        self.launching = parts.launching
        self.shares_generator = parts.shares_generator
        self.pieces = 1
        self.least = min_part_size(plain_layers(module))
        self.optimizer = all_of(parts.optimizers)[0]
        self.casts = AUTOCAST[parts.precision]
        self._caches_casts = parts.caches_casts
        self._scaler = torch.amp.GradScaler(self.device.type) if parts.precision == "fp16" else None
        self._max_grad_norm = parts.max_grad_norm
        self._max_grad_value = parts.max_grad_value
        self._clips = parts.max_grad_norm is not None or parts.max_grad_value is not None
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._trainable = [*self.trained, *flat.thawable]
        self._grad_norms: list[Tensor] = []  # of the gradients, before they were clipped
        self.has_stepped = False
        self.is_compiled = uses_compile(module, function)
        self._redraws = Recheck()  # where the generator is shared
        self._value: Tensor | None = None  # of the loss, over the micro-batches of the step so far
        self._weight: Tensor | None = None  # of the step's losses, per sample, where one named it
        self._unnamed = 0.0  # part of the samples whose losses named none
        self._generator = device_generator(self.device) if is_accelerator(self.device) else None
        self._random: Tensor | None = None  # state of the generator
        self._is_marked = False
        self.steps_flat = self.may_be_flat and obstacle(self.optimizer, module, flat) is None
        self.gradients = self._open_gradients()
        self._flat_optimizer: FlatOptimizer | None = None
        if self.steps_flat and self.gradients is not None:
            self._flat_optimizer = FlatOptimizer(self.optimizer, flat, self.gradients)
        self.captured = None if parts.capture is None else parts.capture(self)
        self._captured_update: CapturedUpdate | None = None
        if self.captured is not None and self._flat_optimizer is not None and self._scaler is None:
            assert isinstance(self.lane, StreamLane)
            self._captured_update = CapturedUpdate(self._flat_optimizer, self.lane, self._recorded)

    @property
    def clips_norm(self) -> bool:
        """Whether the gradients are clipped by their norm."""
        return self._max_grad_norm is not None

    @property
    def has_begun(self) -> bool:
        """See `Capturable`."""
        return self._value is not None

    @property
    def obstacle(self) -> str | None:
        """Why none of its steps can be captured; None: nothing stands in the way."""
        return "its forwards meet those of the other ranks (SyncBatchNorm)" if self.meets else None

    def mark(self, *, is_late: bool = False) -> None:
        """Begin a step, or another piece of work, that `undo` can undo.

        Args:
            is_late: The state is noted when the step first runs eagerly: a captured one is not repeated.
        """
        self._is_marked = False
        if not is_late:
            self._note()

    def _note(self) -> None:
        """Note the state that a repetition of the step's forward and backward starts from."""
        self._is_marked = True
        if self.flat.has_buffers:
            self.flat.keep_buffers()
        if self._generator is not None:
            self._random = self._generator.get_state()

    def undo(self) -> None:
        """Forget forward and backward since the last `mark`.

        Streams:
            As `add`.
        """
        self._clear()
        self._value, self._weight, self._unnamed = None, None, 0.0
        if not self._is_marked:
            return
        if self.flat.has_buffers:
            self.flat.put_back_buffers()
        if self._generator is not None and self._random is not None:
            self._generator.set_state(self._random)

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
        weight, unnamed, self._weight, self._unnamed = self._weight, self._unnamed, None, 0.0
        if weight is None:
            self.loss_weight = None
        else:
            weight = weight + unnamed
            self.loss_weight = weight * factor
            # The gradients are those of loss x weight; a mean over nothing has none.
            factor = 1.0 / torch.where(weight == 0, 1.0, weight)
        self._update(factor)
        return self._take_value()

    def _update(self, factor: float | Tensor) -> None:
        is_scaled = isinstance(factor, Tensor) or factor != 1.0  # a tensor is not read back
        if self._flat_optimizer is not None and self.gradients is not None:
            touched = self.gradients.collect()
            if is_scaled:
                self._rescale(factor)
            self._step_flat(touched)
            return
        if is_scaled:
            self._rescale(factor)
        self._optimize(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self._clear()  # of parameters, too, that it does not have: the next norm is of the next gradients
        if self.average is not None:
            self.average.update()

    def _step_flat(self, touched: Sequence[bool]) -> None:
        """Step the flat memory, and begin another sum of gradients; captured behind captured backwards."""
        assert self._flat_optimizer is not None
        assert self.gradients is not None
        if self._captured_update is not None and self.captured is not None and self.captured.is_running:
            norms = self._captured_update.run(touched)
            if norms is not None:
                self._grad_norms += norms
                self.gradients.forget()
                return
        self._take_step(self._flat_optimizer.prepare(touched))
        self._flat_optimizer.finish()
        self.gradients.clear()

    def _take_step(self, optimizer: Optimizer) -> None:
        self._optimize(optimizer)
        if self.average is not None and not self.steps_at_gate:
            self.average.update()

    def _recorded(self, optimizer: Optimizer) -> list[Tensor]:
        """Take a step that is recorded; returns the norms."""
        before, self._grad_norms = self._grad_norms, []
        try:
            self._take_step(optimizer)
            return self._grad_norms
        finally:
            self._grad_norms = before

    def _optimize(self, optimizer: Optimizer) -> None:
        """Clip and step; in "fp16" unless a gradient overflowed, and the scale follows."""
        scaler = self._scaler
        if self._clips:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self._clip(self._trainable)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def step_alone(self) -> Tensor | None:
        """See `ExactReplica.step_alone`: elsewhere every step is."""
        return self.step()

    def take_norms(self) -> Sequence[Tensor]:
        """The 2-norms of the gradients that were clipped since the last call, before that. Shape [] each."""
        if not self._grad_norms:
            return ()
        norms, self._grad_norms = self._grad_norms, []
        return norms

    def forwards(self, batch: Any, samples: int) -> int:
        """Number of forwards for a micro-batch of this many samples."""
        if self.pieces == 1 or whole_batch(made(batch), samples) is None:
            return 1
        return max(1, min(self.pieces, samples // self.least))

    def meet(self, outcome: Outcome) -> None:
        """Do nothing after a mean; see `ExactReplica.meet`."""

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
            for mine, theirs in zip(_tensors(self.module), _tensors(donor.module), strict=True):
                mine.copy_(theirs)
            for own, other in zip(all_of(self.optimizers), all_of(donor.optimizers), strict=True):
                load_state(own, other.state_dict(), with_groups=False)
            if self.average is not None and donor.average is not None:
                self.average.copy_from(donor.average)
            if self._scaler is not None and donor._scaler is not None:
                self._scaler.load_state_dict(donor._scaler.state_dict())
            self._clear()
        _after(donor.lane, self.lane)

    def close(self) -> None:
        """Free the graphs of captured steps, which know the replica; there are no more steps.

        Threads:
            Any, once the worker has left.
        """
        self.captured = self._captured_update = None

    def optimizer_states(self) -> Any:
        """The `state_dict()` of each optimizer, in the form in which the user gave them."""
        return each_of(self.optimizers, lambda optimizer: optimizer.state_dict())

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Have the parameters in the module with which it is evaluated: their moving average, if any."""
        return nullcontext() if self.average is None else self.average.applied()

    def _open_gradients(self) -> FlatGradients | None:
        return FlatGradients(self.flat) if self.steps_flat else None

    def _clear(self) -> None:
        if self.gradients is None:
            for parameter in self._trainable:
                parameter.grad = None
            return
        self.gradients.clear()
        if self._flat_optimizer is not None:
            self._flat_optimizer.drop_strays()

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
            if factors.share != 1.0 and self.can_repeat and not self._is_marked:
                self._note()  # a later one of the step may be eager
            computed = self.captured.run(batch, worker, factors)
        self.count(self.compute(made(batch), worker, factors) if computed is None else computed, factors)

    def compute(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed:
        """Forward and backward by the user's loss; see `add`."""
        if self.can_repeat and not self._is_marked:
            self._note()
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
        if self.casts is None:
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
        return loss if self._scaler is None else self._scaler.scale(loss)

    def count(self, computed: Computed, factors: Factors) -> None:
        """Add a micro-batch's loss, and the weight that it names, to those of the step."""
        value = computed.loss
        self._value = value if self._value is None else self._value + value
        if computed.weight is None:
            self._unnamed += factors.share
        else:
            self._weight = computed.weight if self._weight is None else self._weight + computed.weight

    def casting(self) -> AbstractContextManager[object]:
        """Autocast, if any. It is a state of the thread: entered where the step runs, and per step."""
        return casting(self.device, self.casts, self._caches_casts)

    def _differentiate(self, loss: Tensor, **options: Any) -> None:
        if not self.shares_generator:
            loss.backward(**options)
            return
        with OwnDraws() if self._redraws.is_due else nullcontext():
            loss.backward(**options)
        self._redraws.passed()

    def _rescale(self, factor: float | Tensor) -> None:
        if self.gradients is None:
            torch._foreach_mul_([p.grad for p in self._trainable if p.grad is not None], factor)
        else:
            self.gradients.scale(factor)
        if self._value is not None:
            self._value = self._value * factor

    def _take_value(self) -> Tensor | None:
        value, self._value = self._value, None
        return value

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of these parameters: by value or by norm, which is kept."""
        if self._max_grad_value is not None:
            if self.gradients is None:
                nn.utils.clip_grad_value_(parameters, self._max_grad_value)
            else:
                self.gradients.clamp(self._max_grad_value)
        if self._max_grad_norm is not None:
            if self.gradients is None:
                norm = nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
            else:
                norm = self.gradients.clip(self._max_grad_norm)
            self._grad_norms.append(norm)

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


def casting(device: torch.device, dtype: torch.dtype | None, caches: bool) -> AbstractContextManager[object]:
    """Autocast to a type, if any; see `ReplicaParts.caches_casts`."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=caches)


def unpack_loss(result: object) -> tuple[Tensor, Any, Mapping[str, Any]]:
    """The loss in the return value of the user's function, the weight that it names, and its scalars.

    Raises:
        TypeError: There is no loss.
    """
    if isinstance(result, Tensor):
        return result, None, {}
    loss: object = result
    weight: Any = None
    scalars: object = {}
    if isinstance(result, Mapping):
        scalars = {name: value for name, value in result.items() if name not in ("loss", "weight")}
        loss, weight = result.get("loss"), result.get("weight")
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, scalars = result
    if not isinstance(loss, Tensor) or not isinstance(scalars, Mapping):
        raise TypeError(
            f"the loss must return a scalar tensor, (loss, scalars) or a mapping with 'loss', not "
            f"{_describe(result)}"
        )
    return loss, weight, scalars


def _describe(result: object) -> str:
    if isinstance(result, Mapping):
        return f"a mapping with {', '.join(map(repr, result)) or 'nothing'}"
    return type(result).__name__


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


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
