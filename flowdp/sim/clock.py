"""Virtual time: events in the order of time, messages in the order of their link."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["Clock"]


class Clock:
    """A heap of things that will happen; simultaneous ones happen in the order they were asked for.

    Args:
        rng: Source of the latencies.
        latency_ms: Longest time that a message takes.

    Attributes:
        now_ms: Virtual time.
        latency_ms: As given.
    """

    def __init__(self, rng: random.Random, latency_ms: float) -> None:
        self.now_ms = 0.0
        self._rng = rng
        self.latency_ms = latency_ms
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._links: dict[object, float] = {}

    def after(self, delay_ms: float, act: Callable[..., None], *args: object) -> None:
        """Call `act` when that much time has passed."""
        self._push(self.now_ms + delay_ms, act, args)

    def send(self, link: object, act: Callable[..., None], *args: object, extra_ms: float = 0.0) -> None:
        """Deliver over a link with a drawn latency: no message overtakes another on its link."""
        at_ms = self.now_ms + self._rng.random() * self.latency_ms + extra_ms
        at_ms = self._links[link] = max(at_ms, self._links.get(link, 0.0))
        self._push(at_ms, act, args)

    def advance(self) -> bool:
        """Let the next thing happen; False when nothing is left to happen."""
        if not self._heap:
            return False
        self.now_ms, _, act, args = heappop(self._heap)
        act(*args)
        return True

    def _push(self, at_ms: float, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._asked += 1
        heappush(self._heap, (at_ms, self._asked, act, args))
