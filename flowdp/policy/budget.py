"""Budget of a device's memory for the data.

The room is the memory that the driver calls free, plus the unused part of the allocator's, less the most that
training has needed so far. So memory that was freed into the allocator's cache counts as free, and the ring's
own batches, which are a part of that peak, are given back before it is divided anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = [
    "DEPTH_LIMIT",
    "FIRST_DEPTH",
    "USAGE",
    "Memory",
    "RingBudget",
    "fits",
    "payload_depth",
    "prefetch_depth",
    "spare_bytes",
]

DEPTH_LIMIT = 16
"""Batches ahead, at most: a device that waits behind so many waits for its reader, and more hide nothing."""

FIRST_DEPTH = 1
"""Batches ahead until the needs of training are known."""

LOOK_MS = 1000.0
"""Time between two readings of a device's memory within an epoch: other programs come and go."""

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


def spare_bytes(memory: Memory, usage: float = USAGE) -> int:
    """Memory left for data when training needs as much as at its peak; may be negative.

    Args:
        memory: Memory of the device.
        usage: Part of the device that may be in use.
    """
    others = max(0, memory.total - memory.free - memory.reserved)
    return int(memory.total * usage) - others - max(memory.peak, memory.active) - memory.split


def prefetch_depth(
    memory: Memory | None,
    batch_bytes: int,
    *,
    ranks: int = 1,
    usage: float = USAGE,
    limit: int = DEPTH_LIMIT,
) -> int:
    """Batches that a rank may hold on its device ahead of the one in use, 0 to `limit`.

    Args:
        memory: Memory of the device, after a whole step; None for a CPU device.
        batch_bytes: Size of one batch on the device.
        ranks: Ranks that share the device.
        usage: Part of the device that may be in use.
        limit: Batches ahead, at most.
    """
    if memory is None or batch_bytes == 0:
        return min(HOST_DEPTH, limit)
    return min(max(spare_bytes(memory, usage) // ranks // batch_bytes, 0), limit)


class RingBudget:
    """Decides how many batches the ranks of a device may hold ahead, from one reading of memory to the next.

    Training needs the peak of memory less the batches that lay ahead then, which is looked at where the peak
    has risen since the last reading. The peak is never reset: it is the user's, too. A step that ran out of
    memory needs more than is known, so the rings give all of theirs, and the budget is closed until such a
    step has been done. A rank that has run short may hold half as many as it did, and twice as many with each
    epoch.

    Args:
        ranks: Ranks of the device.
        usage: Part of the device that may be in use.
        limit: Batches ahead of a rank, at most; None: `DEPTH_LIMIT`.

    Attributes:
        limits: Batches ahead, at most, by what the device has shown. Shape (ranks,).
    """

    def __init__(self, ranks: int, *, usage: float = USAGE, limit: int | None = None) -> None:
        self._usage = usage
        self._limit = DEPTH_LIMIT if limit is None else limit
        self._needed = self._peak = 0
        self._epoch = -1
        self._next_ms = 0.0
        self._waits = set(range(ranks))  # ranks without a step since the budget was closed
        self.limits = [self._limit] * ranks

    @property
    def first(self) -> int:
        """Batches ahead of a rank before the first reading."""
        return min(FIRST_DEPTH, self._limit)

    def trained(self, rank: int) -> None:
        """Note that a rank has taken a whole step, and has allocated all that it needs for one."""
        self._waits.discard(rank)

    def is_due(self, epoch: int, now_ms: float) -> bool:
        """Whether the device's memory is to be read, in this epoch and at this time."""
        return not self._waits and (epoch > self._epoch or now_ms >= self._next_ms)

    def depths(
        self, memory: Memory | None, batch_bytes: list[int], ahead_bytes: int, epoch: int, now_ms: float
    ) -> list[int]:
        """Batches that each rank may hold ahead from now on.

        Args:
            memory: Memory of the device; None for a CPU device.
            batch_bytes: Size of one batch. Shape (ranks,).
            ahead_bytes: Size of the batches that all ranks hold ahead now.
            epoch: Index of the epoch.
            now_ms: Time of the reading.
        """
        if epoch > self._epoch >= 0:
            self.limits = [min(max(1, 2 * limit), self._limit) for limit in self.limits]
        self._epoch, self._next_ms = max(epoch, self._epoch), now_ms + LOOK_MS
        if memory is not None:
            found = memory.peak if memory.peak > self._peak else memory.active
            self._needed, self._peak = max(self._needed, found - ahead_bytes), max(self._peak, memory.peak)
            memory = replace(memory, peak=self._needed, active=0)
        return [
            prefetch_depth(memory, size, ranks=len(batch_bytes), usage=self._usage, limit=limit)
            for size, limit in zip(batch_bytes, self.limits, strict=True)
        ]

    def ran_short(self, rank: int, ahead: int) -> int:
        """Batches that a rank may hold ahead, where there was no room for more than these."""
        self.limits[rank] = min(self.limits[rank], ahead // 2)
        return self.limits[rank]

    def step_ran_short(self, ahead: list[int]) -> None:
        """Close the budget, as a step has run out of memory beside these batches ahead. Shape (ranks,).

        One batch ahead is left to a rank that has not come down to it before: a first step that is too large
        by itself is halved, and says nothing of the ring.
        """
        for rank, count in enumerate(ahead):
            least = min(1, self.limits[rank] // 2)
            self.limits[rank] = min(self.limits[rank], max(least, count // 2))
        self._next_ms, self._waits = 0.0, set(range(len(ahead)))


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
