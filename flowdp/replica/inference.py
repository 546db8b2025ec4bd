"""The user's model and loss on each device without an optimizer, for evaluations and predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flowdp.device.streams import Lane, open_lanes
from flowdp.device.torch_modes import Autocast
from flowdp.replica.build import ReplicaConfig
from flowdp.replica.factories import build_models
from flowdp.replica.loss import loss_function

__all__ = ["InferenceReplica", "build_inference"]


@dataclass(frozen=True, kw_only=True)
class InferenceReplica:
    """Model and loss of one rank.

    Attributes:
        module: Model on its device, the rank's own.
        function: The user's loss; an evaluation without a step calls it.
        lane: Lane of the device.
        casting: Autocast of forward and loss.

    Threads:
        The thread of this rank, once it runs.
    """

    module: nn.Module
    function: Callable[..., Any]
    lane: Lane
    casting: Autocast

    @property
    def device(self) -> torch.device:
        """Device of the rank."""
        return self.lane.device


def build_inference(
    config: ReplicaConfig, devices: Sequence[torch.device], load: Callable[[nn.Module], None]
) -> list[InferenceReplica]:
    """Build one per device; a module that was given is copied, and not touched.

    Args:
        config: Settings of the replicas that are trained.
        devices: One per rank.
        load: Puts the weights into a module, on its device.

    Raises:
        OptionError: The model cannot be copied, or its factory builds none.

    Threads:
        The user's, where all factories are called.
    """
    lanes = open_lanes(devices)
    replicas = []
    for module, lane in zip(build_models(config.model, lanes, trains=False), lanes, strict=True):
        with lane.on(lane.compute):
            load(module)
            function = _no_loss if config.loss is None else loss_function(config.loss, lane.device)
        lane.drain()
        replicas.append(
            InferenceReplica(
                module=module,
                function=function,
                lane=lane,
                casting=Autocast(lane.device, config.precision, caches=len(lanes) == 1),
            )
        )
    return replicas


def _no_loss(*_: object) -> Any:
    raise TypeError("a train_step is no loss: an evaluation has a step of its own")
