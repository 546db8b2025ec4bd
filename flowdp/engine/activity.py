"""Activity of a rank, for other threads to see, and the use of its time."""

from __future__ import annotations

from time import perf_counter

from flowdp.engine.meter import OrderSums
from flowdp.policy.efficiency import Activity, RankTimes
from flowdp.timeline.spans import RankSpans

__all__ = ["RankActivity"]


class RankActivity:
    """Activity of a rank.

    Args:
        spans: Recorder of its spans; None: the run has no timeline.

    Attributes:
        moves: Counts up with all that is no step: meetings, batches evaluated, barrier tasks done.
        longest_ms: The longest step in the orders that have ended.
        awaited: (epoch, batch) that it waits for; None: for none.
        task: Its barrier task, as text; "" while it has none.
        is_idle: It waits for orders.
        is_bound: The other ranks wait for it.
        has_left: Its thread is at its end.

    Threads:
        Written by the rank's worker, read by any.
    """

    def __init__(self, spans: RankSpans | None) -> None:
        self.moves = 0
        self.longest_ms = 0.0
        self.awaited: tuple[int, int] | None = None
        self.task = ""
        self.is_idle = False
        self.is_bound = False
        self.has_left = False
        self._spans = spans
        self._times = RankTimes()
        self._begun_s = self._left_s = 0.0

    def begin(self) -> None:
        """Note that the thread begins."""
        self._begun_s = perf_counter()

    def leave(self) -> None:
        """Note that the thread is at its end."""
        self.has_left, self._left_s = True, perf_counter()

    def moved(self) -> None:
        """Note that it has done something that is no step."""
        self.moves += 1

    def spent(self, activity: Activity, start_s: float) -> None:
        """Count the time since then, which belongs to no step and no round."""
        now_s = perf_counter()
        self._times.add(activity, (now_s - start_s) * 1e3)
        if self._spans is not None:
            self._spans.add(activity, start_s, now_s)

    def count(self, sums: OrderSums) -> None:
        """Count the steps and rounds of an order."""
        self.longest_ms = max(self.longest_ms, sums.longest_ms)
        times = self._times
        times.add(Activity.STEP, sums.busy_ms)
        times.add(Activity.DATA, sums.data_ms)
        times.add(Activity.GATE, sums.wait_ms)
        times.add(Activity.AVERAGE, sums.sync_ms)
        times.steps += sums.steps
        times.samples += sums.samples

    def times(self) -> RankTimes:
        """A copy of its times; any thread may ask."""
        times, end_s = self._times, self._left_s or perf_counter()
        return RankTimes(
            dict(times.ms),
            times.samples,
            times.steps,
            wall_ms=(end_s - self._begun_s) * 1e3 if self._begun_s else 0.0,
        )
