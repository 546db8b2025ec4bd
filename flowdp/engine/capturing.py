"""Captured steps for the replicas of a run: which recorder makes their graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from flowdp.device.streams import CudaLane
from flowdp.engine.captured import Captured, Recorder
from flowdp.engine.cuda_graph import CudaGraphs
from flowdp.engine.guards import Guards
from flowdp.engine.rebuild import variables
from flowdp.engine.replica import Replica
from flowdp.engine.step_graph import CpuRecorder, SharedGraphs
from flowdp.options import CaptureOptions

__all__ = ["capture_steps"]

log = logging.getLogger("flowdp")


def capture_steps(replicas: Sequence[Replica], options: CaptureOptions) -> None:
    """Let replicas run captured steps.

    Args:
        replicas: Of all ranks, newly built.
        options: Of the run.

    Threads:
        The one that builds.
    """
    shared, once = SharedGraphs(), _Once()
    for replica in replicas:
        modules = {"": replica.module, **_modules_of_loss(replica)}
        replica.captured = Captured(
            replica, options, modules, partial(_recorder, replica, modules, shared), once.tell
        )


def _recorder(
    replica: Replica, modules: Mapping[str, nn.Module], shared: SharedGraphs, guards: Guards
) -> Recorder:
    if isinstance(replica.lane, CudaLane):
        return CudaGraphs(replica, [module for module in modules.values() if module is not replica.module])
    return CpuRecorder(replica, modules, guards, shared)


class _Once:
    """Logs each text once, whichever rank comes first.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def tell(self, text: str) -> None:
        """Log a text, unless it was."""
        with self._lock:
            is_new = text not in self._told
            self._told.add(text)
        if is_new:
            log.warning("%s", text)


def _modules_of_loss(replica: Replica) -> dict[str, nn.Module]:
    """The modules that a loss holds: a criterion, a teacher."""
    return {
        f"{name} of the loss": value
        for name, value in variables(replica._loss)
        if isinstance(value, nn.Module) and value is not replica.module
    }
