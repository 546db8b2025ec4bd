"""Captured steps for the ranks of a run on CUDA."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from flowdp.device.accelerator import untried
from flowdp.device.streams import Lane, StreamLane
from flowdp.errors import OptionError
from flowdp.graphs.base import Capturable
from flowdp.graphs.captured_step import Captured
from flowdp.graphs.cuda_graph import CudaGraphs
from flowdp.graphs.guards import Guards
from flowdp.options import CaptureOptions
from flowdp.policy.capture_plan import LaunchWatch
from flowdp.replica.replica import Capture

__all__ = ["capture_steps"]

log = logging.getLogger("flowdp")


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
    told = _Told()

    def make(model: nn.Module, loss: Callable[..., Any], step: Capturable) -> Captured:
        guard, recorder = partial(Guards, model, loss), partial(CudaGraphs, step)
        watch = None if is_chosen else LaunchWatch()
        return Captured(step, options, guard, recorder, partial(told.log_once, is_chosen), watch)

    parts = zip(fit, modules, losses, strict=True)
    return [partial(make, model, loss) if is_fit else None for is_fit, model, loss in parts]


class _Told:
    """Log of texts, each once for all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: set[str] = set()

    def log_once(self, is_chosen: bool, text: str, *, is_shown: bool = False) -> None:
        """Log a text, as a warning where the user has asked for captured steps, or has to see it."""
        with self._lock:
            is_new = text not in self._texts
            self._texts.add(text)
        if is_new:
            log.log(logging.WARNING if is_chosen or is_shown else logging.INFO, "%s", text)
