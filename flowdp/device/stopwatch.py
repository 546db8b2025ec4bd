"""Time of a rank's work on its device, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from flowdp.device.streams import Event, Lane

__all__ = ["Stopwatch"]

KEPT_LAPS = 64
"""Most laps that may wait for the device; with one more, the host waits for the oldest."""


class Stopwatch:
    """Time of the pieces of work between two laps.

    Threads: one at a time; `running` in the rank's own thread, the rest by its owner between.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._free: list[tuple[Event, Event]] = []
        self._pieces: list[tuple[Event, Event]] = []
        self._laps: deque[list[tuple[Event, Event]]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the work enqueued inside.

        Streams:
            Marks are recorded on the current stream.
        """
        lane = self._lane
        start, stop = self._free.pop() if self._free else (lane.event(timing=True), lane.event(timing=True))
        start.record(lane.current())
        yield
        stop.record(lane.current())
        self._pieces.append((start, stop))

    def lap(self) -> None:
        """End a lap."""
        self._laps.append(self._pieces)
        self._pieces = []

    @property
    def is_known(self) -> bool:
        """Whether the device has passed the oldest lap."""
        return bool(self._laps) and (
            len(self._laps) > KEPT_LAPS or all(stop.query() for _, stop in self._laps[0])
        )

    def take_ms(self) -> float:
        """The time of the oldest lap."""
        pieces = self._laps.popleft()
        for _, stop in pieces:
            stop.synchronize()
        self._free += pieces
        return sum(start.elapsed_time(stop) for start, stop in pieces)
