"""Captured steps for the ranks of a run: which recorder makes their graphs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from flowdp.device.streams import StreamLane
from flowdp.graphs.base import Capturable, Recorder
from flowdp.graphs.captured_step import Captured
from flowdp.graphs.cpu_graph import CpuRecorder, SharedGraphs
from flowdp.graphs.cuda_graph import CudaGraphs
from flowdp.graphs.guards import Guards
from flowdp.options import CaptureOptions
from flowdp.replica.optimizer_rebuild import variables
from flowdp.replica.replica import Capture

__all__ = ["Capturing", "capture_steps", "modules_of"]

log = logging.getLogger("flowdp")


def capture_steps(
    modules: Sequence[nn.Module], losses: Sequence[Callable[..., Any]], options: CaptureOptions
) -> list[Capture]:
    """Makers of the captured steps of each rank's replica, of its model and its loss."""
    capturing = Capturing(options)
    held = [modules_of(loss, module) for loss, module in zip(losses, modules, strict=True)]
    holders = Counter(id(module) for found in held for module in {*found.values()})
    makers: list[Capture] = []
    for model, loss, found in zip(modules, losses, held, strict=True):
        own = {name: module for name, module in found.items() if holders[id(module)] == 1}
        read = {"": model, **found}
        makers.append(partial(capturing.of, function=loss, modules=read, own={"": model, **own}))
    return makers


class Capturing:
    """State that all capturing ranks share: options, graphs and the log.

    Args:
        options: Options of all ranks.

    Attributes:
        lock: Held while a rank records on the CPU: its module's tables are not as they are then.
    """

    def __init__(self, options: CaptureOptions) -> None:
        self._options = options
        self._shared = SharedGraphs()
        self._logging = threading.Lock()
        self._logged: set[str] = set()
        self.lock = self._shared.lock

    def of(
        self,
        step: Capturable,
        function: Callable[..., Any],
        modules: Mapping[str, nn.Module],
        own: Mapping[str, nn.Module],
    ) -> Captured:
        """Captured steps of one rank.

        Args:
            step: Forward and backward to capture.
            function: The user's, which a step calls.
            modules: All that the step reads, by name.
            own: Those of them that no other rank computes with: while a step is recorded on the CPU, their
                tensors are replaced.
        """
        guard = partial(Guards, modules, function)
        make = partial(self._recorder, step, modules, own)
        return Captured(step, self._options, guard, make, self._log_once)

    def _recorder(
        self,
        step: Capturable,
        modules: Mapping[str, nn.Module],
        own: Mapping[str, nn.Module],
        guards: Guards,
    ) -> Recorder:
        if isinstance(step.lane, StreamLane):
            return CudaGraphs(step, [module for module in modules.values() if module is not step.module])
        return CpuRecorder(step, own, guards, self._shared)

    def _log_once(self, text: str) -> None:
        """Log a text that no other rank has logged."""
        with self._logging:
            is_new = text not in self._logged
            self._logged.add(text)
        if is_new:
            log.warning("%s", text)


def modules_of(function: object, model: nn.Module) -> dict[str, nn.Module]:
    """The modules that a loss holds besides the model: a criterion, a teacher."""
    return {
        f"{name} of the loss": value
        for name, value in variables(function)
        if isinstance(value, nn.Module) and value is not model
    }
