"""The number of threads of a worker: the fastest for its own steps, found while they run.

More threads are not always faster. Small operations cost more to hand out than to compute; and where other
programs want the cores, one thread of a pool is always off its core, and the others spin at the barrier for
it, in each of the hundred parallel regions of a step: a step of 8 ms on one thread then takes 900 ms on four.
No count of cores tells that, only the steps themselves.
"""

from __future__ import annotations

from itertools import count, takewhile
from math import inf
from statistics import median

__all__ = ["PoolSize"]

BLOCK_MS = 60.0
"""Steps are timed in blocks that last so long at least. A scheduler gives slices of 3 to 10 ms: shorter ones
would tell which thread was interrupted, not which size is fast."""

BLOCKS = 4
"""Blocks of a size that is tried; the first builds the pool and does not count ..."""

LONG_MS = 1000.0
"""... or two of them, where they last so long together."""

GAIN = 0.95
"""A larger size must take less than this part of the time of the smaller one."""

VAIN = 2
"""Sizes in a row without that gain after which no larger one is tried."""

SLOW = 3.0
"""So many times the usual time is trouble: a size that is tried is given up, a chosen one is doubted."""

DOUBTS = 2
"""Blocks in a row that must be slow; one may have been an interruption."""

PAUSE_MS = 10_000.0
"""The sizes are tried again after so much work at least, for the machine may have become quiet ..."""

PRICE = 50.0
"""... and after so many times the cost of the last search: it costs 2 % at most."""


class PoolSize:
    """Chooses by trying: 1, 2, 4, ... threads, until two sizes in a row are no faster.

    It begins with one thread, whose speed depends least on other work of the machine.

    Args:
        budget: Threads at most.
        adapts: Whether there is a choice; False: the budget is the size.

    Attributes:
        size: Threads to compute with now.
        is_fixed: The size never changes, and `worked` has nothing to learn.
    """

    def __init__(self, budget: int, *, adapts: bool = True) -> None:
        self._sizes = [*takewhile(lambda size: adapts and size < budget, (1 << n for n in count())), budget]
        self.is_fixed = len(self._sizes) == 1
        self._ms = 0.0  # of the block under way
        self._samples = 0
        self._search()

    def worked(self, ms: float, samples: int) -> int:
        """Learn from a step; returns `size`, for the next one.

        Args:
            ms: How long it computed.
            samples: How many there were in it.
        """
        self._ms += ms
        self._samples += samples
        if self._ms >= BLOCK_MS and self._samples:
            ms, samples, self._ms, self._samples = self._ms, self._samples, 0.0, 0
            if self._is_searching:
                self._try(ms, samples)
            else:
                self._watch(ms, samples)
        return self.size

    def _search(self) -> None:
        self._is_searching = True
        self._best, self._usual = self._sizes[0], inf  # and the milliseconds of a sample with it
        self._vain = 0
        self._cost_ms, self._cost_samples = 0.0, 0
        self._begin(self._sizes[0])

    def _begin(self, size: int) -> None:
        self.size = size
        self._tried: list[float] = []  # milliseconds of a sample, one per block
        self._tried_ms = 0.0

    def _try(self, ms: float, samples: int) -> None:
        self._tried.append(ms / samples)
        self._tried_ms += ms
        self._cost_ms += ms
        self._cost_samples += samples
        is_hopeless = self._tried[-1] > SLOW * self._usual
        is_long = len(self._tried) > 1 and self._tried_ms >= LONG_MS
        if not (is_hopeless or is_long or len(self._tried) == BLOCKS):
            return
        took = median(self._tried[1:] or self._tried)
        if is_faster := not is_hopeless and took < GAIN * self._usual:
            self._best, self._usual = self.size, took
        # Two threads may share a core, and four have two: a size without a gain does not end the search yet.
        self._vain = 0 if is_faster else self._vain + 1
        larger = [size for size in self._sizes if size > self.size]
        if larger and not is_hopeless and self._vain < VAIN:
            self._begin(larger[0])
            return
        self.size = self._best
        self._is_searching = False
        self._doubts = 0
        self._pause_ms = max(PAUSE_MS, PRICE * (self._cost_ms - self._cost_samples * self._usual))

    def _watch(self, ms: float, samples: int) -> None:
        # One thread waits at no barrier: whatever slows it, a smaller pool is no help.
        is_slow = self.size > 1 and ms / samples > SLOW * self._usual
        self._doubts = self._doubts + 1 if is_slow else 0
        self._pause_ms -= ms
        if self._doubts == DOUBTS or self._pause_ms <= 0:
            self._search()
