"""Gauge of a device's memory, from its driver and torch's allocator."""

from __future__ import annotations

from flowdp.device.streams import CudaLane, Lane
from flowdp.policy.budget import Memory

__all__ = ["empty_cache", "read_memory", "reset_peak"]


def read_memory(lane: Lane) -> Memory | None:
    """The memory of a rank's device now; None for a CPU device.

    It takes some 100 us and, for the allocator's part, its lock with the interpreter's: once in a while,
    never per batch.

    Threads:
        The rank's worker or, before the run, the one that starts it; never at the gate.
    """
    if not isinstance(lane, CudaLane):
        return None
    free, total = lane.cuda.mem_get_info(lane.device)
    stats = lane.cuda.memory_stats(lane.device)  # a key that an allocator does not keep counts as 0

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
    if isinstance(lane, CudaLane):
        lane.cuda.reset_peak_memory_stats(lane.device)


def empty_cache(lane: Lane) -> None:
    """Give memory that no tensor uses back to a device. Hold `QUIET`."""
    if isinstance(lane, CudaLane):
        lane.cuda.empty_cache()
