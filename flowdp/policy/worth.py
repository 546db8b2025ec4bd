"""Whether it pays to cut batches over the devices, and to capture steps: found by the times of steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

__all__ = ["FUTILE", "PAYS", "WARM_UP", "LaunchWatch", "Periods", "Worth"]

WARM_STEPS = 4
"""Steps behind a change that are not timed: caches fill, and pools of threads begin or end. So many that
shares follow the measured speed, from the 11th step on, before the first trial of cut batches ends."""

BLOCK_STEPS, BLOCKS = 3, 3
"""Steps that are timed together, and such blocks of each way; the fastest counts. The others may hold an
evaluation, or another program's work."""

PRICE = 50.0
"""The slower way is tried again after so many times the cost of its last trial: it costs 2 % at most."""

LEAST_STEPS = 100
"""Steps before it is tried again, at least; twice as many after each trial that confirms the faster way."""


class Worth:
    """Chooses between cut batches and the first device alone, by trying both, one after the other.

    It begins with cut batches.

    Attributes:
        is_cut: Whether the next step's batches are cut.
        ms: Milliseconds per sample of each way, by `is_cut`, as they were last measured; empty at first.
        is_chosen: Whether the faster way is known, and taken.
        was_cut: Whether any batch has been cut so far. Without one, the first device did all steps, and their
            times differ by chance.
    """

    def __init__(self) -> None:
        self.is_cut = True
        self.ms: dict[bool, float] = {}
        self.is_chosen = self.was_cut = False
        self._winner: bool | None = None
        self._pause = LEAST_STEPS
        self._left = 0  # steps until the next trial
        self._blocks: dict[bool, list[float]] = {}
        self._steps = 0  # of the way that is tried, since the change
        self._block = (0.0, 0)  # milliseconds and samples of the block under way

    @property
    def is_block_edge(self) -> bool:
        """Whether a block of timed steps begins or ends with the end of the step under way, before `stepped`.

        Devices should have no work left over then.
        """
        timed = self._steps + 1 - WARM_STEPS
        return not self.is_chosen and timed >= 0 and timed % BLOCK_STEPS == 0

    def stepped(self, took_ms: float, samples: int, *, was_cut: bool) -> None:
        """Learn from a step.

        Args:
            took_ms: Milliseconds from the end of the step before to its own.
            samples: Samples of the step.
            was_cut: Whether a batch of it was cut.
        """
        self.was_cut |= was_cut
        if self.is_chosen:
            self._left -= 1
            if self._left <= 0:  # the way that is taken is measured first
                self.is_chosen, self._blocks = False, {}
                self._begin(self.is_cut)
            return
        self._steps += 1
        timed = self._steps - WARM_STEPS
        if timed <= 0:
            return
        ms, count = self._block[0] + took_ms, self._block[1] + samples
        self._block = ms, count
        if timed % BLOCK_STEPS:
            return
        self._blocks.setdefault(self.is_cut, []).append(ms / max(1, count))
        self._block = 0.0, 0
        if timed == BLOCK_STEPS * BLOCKS:
            self._begin(not self.is_cut)
            if len(self._blocks) == 2:
                self._choose()

    def _begin(self, is_cut: bool) -> None:
        self.is_cut, self._steps, self._block = is_cut, 0, (0.0, 0)

    def _choose(self) -> None:
        self.ms = {way: min(blocks) for way, blocks in self._blocks.items()}
        winner = self.was_cut and self.ms[True] < self.ms[False]
        self._pause = self._pause * 2 if winner is self._winner else LEAST_STEPS
        low, high = sorted(self.ms.values())
        cost = (high / low - 1) * (WARM_STEPS + BLOCK_STEPS * BLOCKS) if low else 0.0
        self._left = max(self._pause, int(PRICE * cost))
        self._winner, self.is_chosen = winner, True
        self._begin(winner)


WARM_UP = 2
"""Eager steps of a form before it is recorded: they allocate memory at first use."""

PAYS = 100
"""Steps that a graph must have run for its recording to have been worth it."""

FUTILE = 8
"""Graphs that ran fewer steps than that and became void, after which no other is recorded."""

WATCHED = 50
"""Steps that are watched before it is decided whether a run's are captured."""

SETTLED = 10
"""The first of these do not count: they load kernels and allocate."""

BESIDE = 1.1
"""A device that ends a step at most this much later than the host has launched it had been waiting for it."""


class LaunchWatch:
    """Tells whether the host is behind its device: whether a step's launches take longer than its kernels.

    A device that waits for launches ends a step as soon as the last one has come, so it takes as long as the
    host. One with enough to do takes longer.

    Attributes:
        is_behind: Whether the host is, in most steps; None: too few have been seen.
        launch_ms: Median time of the host for a step, once that is known.
        device_ms: Median time of the device for a step, likewise.
    """

    def __init__(self) -> None:
        self.is_behind: bool | None = None
        self.launch_ms = self.device_ms = 0.0
        self._seen: list[tuple[float, float]] = []

    def take(self, launch_ms: float, device_ms: float) -> None:
        """Take the times of an eager step, on the host and on the device."""
        if self.is_behind is not None:
            return
        self._seen.append((launch_ms, device_ms))
        if len(self._seen) < WATCHED:
            return
        seen = self._seen[SETTLED:]
        self.is_behind = 2 * sum(device <= BESIDE * launch for launch, device in seen) > len(seen)
        self.launch_ms, self.device_ms = (median(times) for times in zip(*seen, strict=True))
        self._seen.clear()


class Periods:
    """Tells whether a loop is slower since its calls are captured: by the time from one call to the next.

    Graphs save launches, and cost copies and Python of their own: that a device waited for launches does not
    say which is more. A call that is recorded or compared counts for neither.

    Attributes:
        is_slower: None: too few captured calls have been seen.
        eager_ms: Mean time from an eager call to the next, once that is known.
        captured_ms: The same of captured ones.
    """

    def __init__(self) -> None:
        self.is_slower: bool | None = None
        self.eager_ms = self.captured_ms = 0.0
        self._seen: dict[bool, list[float]] = {False: [], True: []}
        self._start_ms = 0.0  # of the call before ...
        self._was: bool | None = None  # ... and whether it was captured

    def begins(self, now_ms: float) -> None:
        """Take the time at which a call begins."""
        if self._was is not None:
            self._seen[self._was].append(now_ms - self._start_ms)
        self._start_ms, self._was = now_ms, None
        if len(self._seen[True]) == WATCHED:
            self.eager_ms, self.captured_ms = _usual(self._seen[False]), _usual(self._seen[True])
            self.is_slower = self.captured_ms > self.eager_ms

    def was(self, *, is_captured: bool) -> None:
        """Say how the call that has begun is done."""
        self._was = is_captured


def _usual(seen: Sequence[float]) -> float:
    """The mean without the first ones, and without the slowest quarter: evaluations, another program's work.

    Not the median: where a step has several calls, that is the time between two of them.
    """
    settled = sorted(seen[SETTLED:] or seen)
    return fmean(settled[: max(1, 3 * len(settled) // 4)])
