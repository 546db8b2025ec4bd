"""Memory of a device that has failed.

A kernel's assertion or an illegal access spoils a CUDA device for the process: each later call raises. Torch
calls CUDA where memory is freed that two streams have used, or that was pinned and copied, and there, in a
destructor, an error ends the process at once (`std::terminate`): its user would never read the first one.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable

from torch import Tensor

from flowdp.device.streams import Lane

__all__ = ["keep_memory"]


def keep_memory(lanes: Iterable[Lane]) -> None:
    """Keep all tensors of the process for ever if a device has failed; else do nothing.

    Call it where an error is caught, before anything that the error's traceback does not hold is dropped.

    Args:
        lanes: Lanes of the devices that may have failed.

    Threads:
        Any.

    Source:
        c10/cuda/CUDACachingAllocator.cpp (`insert_events`), ATen/core/CachingHostAllocator.h (`free`).
    """
    if not any(lane.has_failed() for lane in lanes):
        return
    for one in gc.get_objects():
        # Of the type: `isinstance` would ask `__class__`, which may be the user's code.
        if issubclass(type(one), Tensor):
            # A list of them would be emptied when the interpreter ends, and the process with it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
