"""Memory, events and graphs of a device that has failed.

A kernel's assertion or an illegal access spoils a CUDA device for the process: each later call raises. Torch
calls CUDA where memory is freed that two streams have used, or that was pinned and copied, and there, in a
destructor, an error ends the process at once (`std::terminate`): its user would never read the first one.
Where an event or a graph is destroyed, torch only warns; but a run has dozens of them, and their warnings
would stand behind its error.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from flowdp.device.streams import Lane

__all__ = ["keep_memory"]

_KEPT = (Tensor, torch.Event, torch.cuda.Event, torch.xpu.Event, torch.cuda.CUDAGraph)


def keep_memory(lanes: Iterable[Lane]) -> None:
    """Keep all tensors, events and graphs of the process for ever if a device has failed; else do nothing.

    Call it where an error is caught, before anything that the error's traceback does not hold is dropped.

    Args:
        lanes: Lanes of the devices that may have failed.

    Threads:
        Any.

    Source:
        c10/cuda/CUDACachingAllocator.cpp (`insert_events`), ATen/core/CachingHostAllocator.h (`free`),
        ATen/cuda/CUDAEvent.h (`~CUDAEvent`), ATen/cuda/CUDAGraph.cpp (`reset`).
    """
    if not any(lane.has_failed() for lane in lanes):
        return
    for one in gc.get_objects():
        # Of the type: `isinstance` would ask `__class__`, which may be the user's code.
        if issubclass(type(one), _KEPT):
            # A list of them would be emptied when the interpreter ends, and the process with it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
