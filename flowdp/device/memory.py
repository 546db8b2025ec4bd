"""Memory of a device: its gauge, from driver and torch's allocator, and what is kept where it has failed.

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

from flowdp.device.streams import Lane, StreamLane
from flowdp.policy.budget import Memory

__all__ = ["empty_cache", "keep_memory", "read_memory", "reset_peak"]


def read_memory(lane: Lane) -> Memory | None:
    """The memory of a rank's device now; None for a CPU device.

    It takes some 100 us and, for the allocator's part, its lock with the interpreter's: once in a while,
    never per batch.

    Threads:
        A prefetch thread, under `QUIET`; before the run the one that starts it.
    """
    if not isinstance(lane, StreamLane):
        return None
    free, total = lane.device_module.mem_get_info(lane.device)
    stats = lane.device_module.memory_stats(lane.device)  # a key that an allocator does not keep counts as 0

    def used(when: str) -> int:
        # cudaMallocAsync keeps one of the two, which one depends on torch's version.
        kinds: list[int] = [stats.get(f"{kind}_bytes.all.{when}", 0) for kind in ("active", "allocated")]
        return max(kinds)

    return Memory(
        total=total,
        free=free,
        reserved=stats.get("reserved_bytes.all.current", 0),
        active=used("current"),
        peak=used("peak"),
        split=stats.get("inactive_split_bytes.all.current", 0),
    )


def reset_peak(lane: Lane) -> None:
    """Reset a device's peak: the needs of an earlier run of the process say nothing about this one.

    Threads:
        The one that starts the run, before its workers.
    """
    if isinstance(lane, StreamLane):
        lane.device_module.reset_peak_memory_stats(lane.device)


def empty_cache(lane: Lane) -> None:
    """Give memory that no tensor uses back to a device. Hold `QUIET`."""
    if isinstance(lane, StreamLane):
        lane.device_module.empty_cache()


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
