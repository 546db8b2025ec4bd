"""Threads with which one rank computes on the CPU: its own, or, while it trains alone, those of all."""

from __future__ import annotations

from flowdp.device.cores import set_own_threads

__all__ = ["RankPool"]

CROWDED = 2.0
"""With the threads of all ranks a sample may take this many times as long as with the rank's own. If it takes
longer, other programs want the cores, and threads that compute together wait for the one that has none ..."""

PATIENCE_MS = 20.0
"""... but not for the first time: so much is lost in an order before its threads are given back. A scheduler
interrupts any thread now and then, for 3 to 10 ms."""


class RankPool:
    """Size of a rank's OpenMP pool.

    Args:
        size: Threads of its own.
        budget: Threads of the pools of all ranks, which are this one's while it trains alone.

    Threads:
        The rank's worker.
    """

    def __init__(self, size: int, budget: int) -> None:
        self._size, self._budget = size, budget
        self._is_alone = False
        self._crowded_ms = 0.0  # lost by the threads of all in the order under way
        self._sample_ms = 0.0  # with its own threads

    def begin(self) -> None:
        """Have the rank's own threads: at its start, and where it trains with the others again."""
        self._is_alone = False
        set_own_threads(self._size)

    def begin_alone(self) -> None:
        """Have the threads of all ranks, from the first step of an order that it trains alone."""
        if not self._is_alone:
            self._is_alone, self._crowded_ms = True, 0.0
            set_own_threads(self._budget)

    def worked(self, step_ms: float, samples: int, *, alone: bool) -> None:
        """Learn from a step; threads that are crowded are given back."""
        if not alone:
            self._sample_ms = step_ms / samples
        elif (late_ms := step_ms - CROWDED * self._sample_ms * samples) > 0.0:
            self._crowded_ms += late_ms
            if self._crowded_ms > PATIENCE_MS:
                set_own_threads(self._size)  # for the rest of the order
