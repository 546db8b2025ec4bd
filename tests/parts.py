"""Parts of a replica, for tests that make one by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import HostLane, Lane
from flowdp.replica.factories import Optimizers, all_of
from flowdp.replica.learning_rate import LearningRate
from flowdp.replica.parts import ReplicaParts


def parts_of(
    module: nn.Module, optimizers: Optimizer | Optimizers, lane: Lane | None = None, **options: Any
) -> ReplicaParts:
    """The parts of a replica of this module; it is flattened."""
    own: Optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    options.setdefault("learning_rate", LearningRate(all_of(own)))
    return ReplicaParts(
        module=module,
        flat=FlatReplica(module),
        optimizers=own,
        lane=lane or HostLane(torch.device("cpu")),
        **options,
    )
