"""Captured steps for the ranks of a run on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from flowdp.device.accelerator import untried
from flowdp.device.streams import Lane, StreamLane
from flowdp.errors import OptionError
from flowdp.graphs.base import Capturable
from flowdp.graphs.captured_step import Captured
from flowdp.graphs.decisions import LogOnce
from flowdp.graphs.guards import Guards
from flowdp.options import CaptureOptions
from flowdp.policy.worth import LaunchWatch
from flowdp.replica.parts import Capture

__all__ = ["capture_steps"]


def capture_steps(
    modules: Sequence[nn.Module],
    losses: Sequence[Callable[..., Any]],
    lanes: Sequence[Lane],
    options: CaptureOptions,
    *,
    is_chosen: bool,
) -> list[Capture | None]:
    """Makers of the captured steps of each rank's replica, of its model and its loss; None on other devices.

    Args:
        modules: The model of each rank.
        losses: The loss of each rank.
        lanes: The lane of each rank.
        options: Options of all ranks.
        is_chosen: Whether the user has asked for it; else steps are captured where that makes them faster.

    Raises:
        OptionError: It was asked for, and no rank's steps can be captured.
    """
    fit = [isinstance(lane, StreamLane) and untried(lane.device.type) is None for lane in lanes]
    if is_chosen and not any(fit):
        devices = ", ".join(dict.fromkeys(str(lane.device) for lane in lanes))
        raise OptionError(
            f"capture=True records steps as CUDA graphs, and the devices are {devices}; capture='auto' (the "
            "default) records them where there is a CUDA device and it pays"
        )
    tell = LogOnce(is_chosen)

    def make(model: nn.Module, loss: Callable[..., Any], step: Capturable) -> Captured:
        watch = None if is_chosen else LaunchWatch()
        return Captured(step, options, partial(Guards, model, loss), tell, watch)

    parts = zip(fit, modules, losses, strict=True)
    return [partial(make, model, loss) if is_fit else None for is_fit, model, loss in parts]
