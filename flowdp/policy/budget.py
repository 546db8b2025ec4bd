"""Budget of a device's memory for the data.

The room is the memory that the driver calls free, plus the unused part of the allocator's, less the most that
training has needed so far. So memory that was freed into the allocator's cache counts as free, and the ring's
own batches, which are a part of that peak, are given back before it is divided anew.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEPTH_LIMIT", "Memory", "clamp_usage", "fits", "payload_depth", "prefetch_depth", "spare_bytes"]

DEPTH_LIMIT = 512
"""Batches ahead, at most: of tiny ones millions would fit, and bring nothing."""

HOST_DEPTH = 2
"""Batches ahead where there is no gauge: a CPU device."""

PAYLOAD_BYTES = 2 << 30
"""Host memory, per rank, of batches that were read and are not trained yet ..."""

PAYLOAD_LIMIT = 64
"""... and how many of them: from a reading process each tensor comes with a file descriptor."""

USAGE = 0.90
"""Part of a device that may be in use; the rest is for memory that is not counted: libraries' workspaces."""

RESIDENT_PART = 0.5
"""Part of the spare memory that a dataset may take before the first step: gradients, optimizer state and
activations are still to come, and nothing is known of their size."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory at one moment, in bytes.

    Attributes:
        total: All of it.
        free: Memory that the driver would still hand out, to any process.
        reserved: Memory that this process's allocator holds.
        active: Memory of tensors, a part of `reserved`.
        peak: The most that `active` has been.
        split: Reserved and unused memory in pieces between used ones.
    """

    total: int
    free: int
    reserved: int
    active: int
    peak: int
    split: int


def clamp_usage(usage: float) -> float:
    """The part of a device that may be in use, between 0.5 and 0.99."""
    return min(max(usage, 0.5), 0.99)


def spare_bytes(memory: Memory, usage: float = USAGE) -> int:
    """Memory left for data when training needs as much as at its peak; may be negative.

    Args:
        memory: Memory of the device.
        usage: Part of the device that may be in use.
    """
    others = max(0, memory.total - memory.free - memory.reserved)
    return int(memory.total * clamp_usage(usage)) - others - max(memory.peak, memory.active) - memory.split


def prefetch_depth(
    memory: Memory | None, batch_bytes: int, *, ranks: int = 1, ahead_bytes: int = 0, usage: float = USAGE
) -> int:
    """Batches that a rank may hold on its device ahead of the one in use, 1 to `DEPTH_LIMIT`.

    Args:
        memory: Memory of the device, after a whole step; None for a CPU device.
        batch_bytes: Size of one batch on the device.
        ranks: Ranks that share the device.
        ahead_bytes: Size of the batches that all of them hold ahead already; a part of the peak.
        usage: Part of the device that may be in use.
    """
    if memory is None or batch_bytes == 0:
        return HOST_DEPTH
    share = (spare_bytes(memory, usage) + ahead_bytes) // ranks
    return min(max(share // batch_bytes, 1), DEPTH_LIMIT)


def payload_depth(batch_bytes: int) -> int:
    """Batches ahead whose host memory is kept until they are trained, so that they can be dealt anew.

    Args:
        batch_bytes: Size of one batch.
    """
    return min(max(PAYLOAD_BYTES // max(batch_bytes, 1), 1), PAYLOAD_LIMIT)


def fits(memory: Memory, needed_bytes: int, *, usage: float = USAGE) -> bool:
    """Whether a dataset may lie on the device as a whole, asked before the first step.

    Args:
        memory: Memory of the device.
        needed_bytes: Size of the allocation.
        usage: Part of the device that may be in use.
    """
    return needed_bytes <= spare_bytes(memory, usage) * RESIDENT_PART
