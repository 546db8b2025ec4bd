"""Gauge of a device's memory, which sizes the prefetch rings of the ranks there.

It is read by the prefetch threads, before they fetch a batch: at the first mean, in each epoch, once in a
second, and after a step that ran out of memory. So a ring grows into memory that is free, and makes room for
training and for other programs, down to no batch ahead; nothing on the way of a step asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from flowdp.device.memory import read_memory
from flowdp.device.streams import QUIET, Lane
from flowdp.policy.budget import USAGE, Memory, RingBudget

if TYPE_CHECKING:
    from flowdp.data.prefetch import PrefetchFeed

__all__ = ["RingGauge"]


class RingGauge:
    """Sizes the rings of a device's ranks by its memory.

    Args:
        lane: Lane of one of the ranks.
        ranks: Ranks of the device, each of which joins.
        usage: Part of the device that may be in use.
        limit: Batches ahead of a rank, at most; None: `DEPTH_LIMIT`.
        read: Reads the memory, in tests.

    Threads:
        Any.
    """

    def __init__(
        self,
        lane: Lane,
        ranks: int = 1,
        *,
        usage: float = USAGE,
        limit: int | None = None,
        read: Callable[[], Memory | None] | None = None,
    ) -> None:
        self._read = partial(read_memory, lane) if read is None else read
        self._rings: list[PrefetchFeed] = []
        self._lock = threading.Lock()  # guards the budget; taken before that of a ring
        self._budget = RingBudget(ranks, usage=usage, limit=limit)

    def join(self, ring: PrefetchFeed) -> int:
        """Add a ring, and return its number here."""
        self._rings.append(ring)
        return len(self._rings) - 1

    @property
    def first(self) -> int:
        """Batches ahead of a rank before the memory has been read."""
        return self._budget.first

    def trained(self, number: int) -> None:
        """Note that a rank has taken a whole step."""
        with self._lock:
            self._budget.trained(number)

    def look(self, epoch: int) -> None:
        """Read the memory and size all rings of the device by it, where that is due.

        Args:
            epoch: Index of the epoch of the batch that is to be fetched.
        """
        now_ms = perf_counter() * 1e3
        with self._lock:
            if not self._rings or not self._budget.is_due(epoch, now_ms):
                return
            with QUIET:
                memory = self._read()
            sizes = [ring.batch_bytes for ring in self._rings]
            ahead_bytes = sum(ring.ahead * size for ring, size in zip(self._rings, sizes, strict=True))
            depths = self._budget.depths(memory, sizes, ahead_bytes, epoch, now_ms)
            for ring, depth in zip(self._rings, depths, strict=True):
                ring.resize(depth)

    def ran_short(self, number: int, ahead: int) -> None:
        """Note that a ring had no room for more than these batches ahead, and shorten it."""
        with self._lock:
            if self._rings:
                self._rings[number].resize(self._budget.ran_short(number, ahead))

    def give_all(self) -> bool:
        """Free the memory of all rings of the device, as a step has run out of memory.

        Returns:
            False where they held nothing ahead.
        """
        with self._lock:
            self._budget.step_ran_short([ring.ahead for ring in self._rings])
            given = [ring.resize(0) for ring in self._rings]  # each of them, also behind one that gives
            return any(given)

    def close(self) -> None:
        """Let all rings go, as the run is over: they keep it alive."""
        with self._lock:
            self._rings.clear()
