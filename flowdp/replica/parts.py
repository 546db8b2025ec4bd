"""The objects and settings that a replica is made of."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Semaphore

from torch import nn

from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import Lane
from flowdp.graphs.captured_step import Capture
from flowdp.options import Precision
from flowdp.replica.factories import Optimizers
from flowdp.replica.learning_rate import LearningRate

__all__ = ["ReplicaParts"]


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
