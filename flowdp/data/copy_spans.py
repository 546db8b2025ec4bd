"""Spans of the copies of batches to a device, on the clock of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from flowdp.device.streams import Event, Lane
from flowdp.policy.efficiency import Activity
from flowdp.timeline.spans import RankSpans

__all__ = ["CopySpans"]

IN_FLIGHT = 3
"""Copies whose times are not read yet. The prefetch thread waits for a copy as old as this anyway, before it
fills the host's slot again."""


class CopySpans:
    """Recorder of the copies on a rank's copy stream.

    Args:
        lane: Lane of the rank.
        spans: Spans of the rank.

    Threads:
        The prefetch thread's.
    """

    def __init__(self, lane: Lane, spans: RankSpans) -> None:
        self._lane = lane
        self._spans = spans
        self._unused: list[Event] = []
        self._flights: deque[tuple[Event, Event]] = deque()
        self._passed = self._mark()  # a mark that the device has passed, ...
        self._passed.synchronize()
        self._passed_s = perf_counter()  # ... and when

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Context in which a copy is enqueued; at its end, copies that are over are recorded."""
        begin = self._mark()
        yield
        self._flights.append((begin, self._mark()))
        while len(self._flights) > IN_FLIGHT:
            self._land()

    def close(self) -> None:
        """Wait for the copies in flight, and record them."""
        while self._flights:
            self._land()

    def _land(self) -> None:
        begin, end = self._flights.popleft()
        end.synchronize()
        start_s = self._passed_s + self._passed.elapsed_time(begin) / 1e3
        end_s = start_s + begin.elapsed_time(end) / 1e3
        self._spans.add(Activity.TRANSFER, start_s, end_s)
        # Counted from the last mark: over hours a time from the first one would lose its digits.
        self._unused += (self._passed, begin)
        self._passed, self._passed_s = end, end_s

    def _mark(self) -> Event:
        event = self._unused.pop() if self._unused else self._lane.event(timing=True)
        event.record(self._lane.copy)
        return event
