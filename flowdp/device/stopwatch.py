"""Time of a rank's work on its device, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from flowdp.device.streams import Event, Lane
from flowdp.policy.efficiency import Activity

__all__ = ["Stopwatch"]

Piece = tuple[Activity, Event, Event]

KEPT_LAPS = 64
"""Most laps that may wait for the device; with one more, the host waits for the oldest."""


class Stopwatch:
    """Time of the pieces of work between two laps.

    Args:
        lane: Lane of the rank.
        keeps: Whether `spans` are kept; the host waits for the device once, here.

    Attributes:
        spans: Pieces of the lap taken last, where they are kept: their activity, start and end, in seconds by
            `perf_counter`.

    Threads: one at a time; `running` in the rank's own thread, the rest by its owner between.
    """

    def __init__(self, lane: Lane, *, keeps: bool = False) -> None:
        self._lane = lane
        self._free: list[Piece] = []
        self._pieces: list[Piece] = []
        self._laps: deque[list[Piece]] = deque()
        self.spans: list[tuple[Activity, float, float]] = []
        self._base: Event | None = None
        self._base_s = 0.0
        if keeps:
            self._base = base = lane.event(timing=True)
            base.record(lane.current())
            base.synchronize()
            self._base_s = perf_counter()

    @contextmanager
    def running(self, activity: Activity = Activity.STEP) -> Iterator[None]:
        """Time the work enqueued inside.

        Args:
            activity: Its name, for `spans`.

        Streams:
            Marks are recorded on the current stream.
        """
        lane = self._lane
        if self._free:
            _, start, stop = self._free.pop()
        else:
            start, stop = lane.event(timing=True), lane.event(timing=True)
        start.record(lane.current())
        yield
        stop.record(lane.current())
        self._pieces.append((activity, start, stop))

    def lap(self) -> None:
        """End a lap."""
        self._laps.append(self._pieces)
        self._pieces = []

    @property
    def is_known(self) -> bool:
        """Whether the device has passed the oldest lap."""
        return bool(self._laps) and (
            len(self._laps) > KEPT_LAPS or all(stop.query() for *_, stop in self._laps[0])
        )

    def take_ms(self) -> float:
        """The time of the oldest lap."""
        pieces = self._laps.popleft()
        for *_, stop in pieces:
            stop.synchronize()
        took_ms = sum(start.elapsed_time(stop) for _, start, stop in pieces)
        if (base := self._base) is not None:
            since = self._base_s
            self.spans = [
                (activity, since + base.elapsed_time(start) / 1e3, since + base.elapsed_time(stop) / 1e3)
                for activity, start, stop in pieces
            ]
            if pieces:  # the next lap is placed by the end of this one: a device's clock has few digits
                activity, start, self._base = pieces[-1]
                pieces[-1], self._base_s = (activity, start, base), self.spans[-1][2]
        self._free += pieces
        return took_ms
