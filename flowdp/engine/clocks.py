"""Clocks of a rank: marks on its work, the time between two of them, and numbers that the work gives.

On the CPU all is done when a call returns. An accelerator runs behind its host: marks are events on the
compute stream, numbers stay in device memory, and both are read when a later mark shows that they are there.
So nothing on the step path waits for the device, but for the one bound that it needs anyway: the host may be
`STEPS_AHEAD` steps ahead.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flowdp.device.streams import QUIET, Event, Lane

__all__ = ["PAGE", "STEPS_AHEAD", "DeviceClock", "HostClock", "Kind", "Mark", "wait_for"]

STEPS_AHEAD = 3
"""Steps that lie on a device at most: enough that it never waits for the host, few enough that an order to
stop is obeyed soon and the driver's queue never fills, which would block the host inside a launch."""

PAGE = 512
"""Numbers that a device keeps before it hands them over."""

Mark = Any
"""A point in a rank's work: seconds by `perf_counter`, or an `Event`."""


class Kind(IntEnum):
    """Kind of work that a mark ends; an int, as other enums are hashed in Python, several times a step."""

    STEP = auto()
    ROUND = auto()
    FACT = auto()
    OTHER = auto()


def wait_for(event: Event) -> None:
    """Wait until the device has passed a mark that the host runs ahead of."""
    event.synchronize()


class HostClock:
    """Clock of a rank whose work is done when the call returns.

    Threads:
        The worker's own.

    Attributes:
        is_behind: Whether the device runs behind its host.
    """

    is_behind = False

    def __init__(self) -> None:
        self._waited_s = 0.0  # for the batches of the next step, or of the one under way
        self._inside_s = 0.0  # since the step under way began

    def mark(self) -> Mark:
        """Mark the work so far."""
        return perf_counter()

    def begin(self, start_s: float) -> Mark:
        """Mark the begin of a step, whose batch the host began to get at `start_s`."""
        self._inside_s = 0.0
        return start_s

    def since(self, _last: Mark, start_s: float) -> Mark:
        """The mark from which work counts that the host began at `start_s`, behind the mark before."""
        return start_s

    def ms(self, start: Mark, end: Mark) -> float:
        """Milliseconds between two marks."""
        return float(end - start) * 1e3

    def step_ms(self, _last: Mark, begin: Mark, end: Mark) -> tuple[float, float]:
        """Time of a step, and of the wait for its data, behind the last mark before it."""
        data_ms, self._waited_s = self._waited_s * 1e3, 0.0
        return (end - begin - self._inside_s) * 1e3, data_ms

    def waited(self, seconds: float) -> None:
        """Note that the host waited for a batch."""
        self._waited_s += seconds
        self._inside_s += seconds

    def start_s(self, ms: float, end: Mark) -> float:
        """Start of the next span in the order of the work, of so many ms, by `perf_counter`."""
        return float(end) - ms / 1e3

    def read(self, use: Callable[..., None], given: tuple[Any, ...], *numbers: Tensor) -> Sequence[Tensor]:
        """Call `use(*given, *values)` with the values of tensors, shape [] each, when they are there.

        Returns:
            Copies of them on a device that runs behind its host. Float64.
        """
        use(*given, *[number.item() for number in numbers])
        return ()

    def send(self) -> None:
        """Let all numbers so far come to the host behind the work."""

    def then(
        self,
        land: Callable[..., None],
        given: tuple[Any, ...],
        _kind: Kind,
        _mark: Mark,
        _spent: Sequence[Mark],
    ) -> None:
        """Call `land(*given)` once the mark was passed, and what came before has landed.

        Args:
            land: Called at once, or in a later call of this clock.
            given: Its arguments.
            _kind: Kind of the work that the mark ends.
            _mark: The mark.
            _spent: Marks that are not needed behind that.
        """
        land(*given)

    def limit(self, kind: Kind, most: int) -> None:
        """Wait until at most so many pieces of this kind have not landed."""

    def settle(self, _last: Mark) -> Mark:
        """Wait until all has landed; returns the mark from which time counts again.

        Args:
            _last: The last mark.
        """
        return perf_counter()


@dataclass(slots=True)
class _Flight:
    """A mark that the device has yet to pass, and the action to take then.

    Attributes:
        mark: Of numbers none: they are there when a later mark is passed.
    """

    land: Callable[..., None]
    given: tuple[Any, ...]
    kind: Kind
    mark: Event | None
    spent: Sequence[Event]


class DeviceClock(HostClock):
    """Clock of a rank whose device runs behind its host.

    Args:
        lane: Lane of the rank; its compute stream is current at each call.
    """

    is_behind = True

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane
        self._flights: deque[_Flight] = deque()
        self._counts: Counter[Kind] = Counter()  # of them
        self._events: list[Event] = []  # to be recorded again: to destroy one may block
        self._kept: list[Tensor] = []
        # Of the numbers kept: each use, what is given to it, and how many it takes.
        self._uses: list[tuple[Callable[..., None], tuple[Any, ...], int]] = []
        self._pages = [self._new_page(), self._new_page()]
        # When the device passed the last mark that has landed, by the host's clock: set where the host has
        # waited for it, and carried on by the times between two marks.
        self._landed_s = perf_counter()

    def mark(self) -> Mark:
        """See `HostClock.mark`."""
        event = self._events.pop() if self._events else self._lane.event(timing=True)
        event.record(self._lane.compute)
        return event

    def begin(self, _start_s: float) -> Mark:
        """See `HostClock.begin`; the device has its own time."""
        return self.mark()

    def since(self, last: Mark, _start_s: float) -> Mark:
        """See `HostClock.since`."""
        return last

    def ms(self, start: Mark, end: Mark) -> float:
        """See `HostClock.ms`; both marks were passed."""
        return float(start.elapsed_time(end))

    def step_ms(self, last: Mark, begin: Mark, end: Mark) -> tuple[float, float]:
        """See `HostClock.step_ms`: between two steps the device waited for data, or for the host."""
        return self.ms(begin, end), self.ms(last, begin)

    def waited(self, seconds: float) -> None:
        """Do nothing: a device sees for itself when it has nothing to do."""

    def start_s(self, ms: float, _end: Mark) -> float:
        """See `HostClock.start_s`."""
        start_s, self._landed_s = self._landed_s, self._landed_s + ms / 1e3
        return start_s

    def read(self, use: Callable[..., None], given: tuple[Any, ...], *numbers: Tensor) -> Sequence[Tensor]:
        """See `HostClock.read`."""
        copies = [number.to(self._lane.device, torch.float64, copy=True) for number in numbers]
        self._kept += copies
        self._uses.append((use, given, len(copies)))
        if len(self._kept) >= PAGE:
            self.send()
        return copies

    def send(self) -> None:
        """See `HostClock.send`."""
        if not self._kept:
            return
        kept, uses = torch.stack(self._kept), self._uses
        self._kept, self._uses = [], []
        pages: list[Tensor] = []
        for part in kept.split(PAGE):
            pages.append(self._pages.pop() if self._pages else self._new_page())
            pages[-1][: len(part)].copy_(part, non_blocking=True)

        def land() -> None:
            numbers = iter([number for page in pages for number in page.tolist()])
            self._pages += pages
            for use, given, count in uses:
                use(*given, *islice(numbers, count))

        self._flights.append(_Flight(land, (), Kind.OTHER, None, ()))

    def then(
        self,
        land: Callable[..., None],
        given: tuple[Any, ...],
        kind: Kind,
        mark: Mark,
        spent: Sequence[Mark],
    ) -> None:
        """See `HostClock.then`."""
        self._counts[kind] += 1
        self._flights.append(_Flight(land, given, kind, mark, spent))

    def limit(self, kind: Kind, most: int) -> None:
        """See `HostClock.limit`."""
        while self._counts[kind] > most:
            oldest = next(flight.mark for flight in self._flights if flight.mark is not None)
            wait_for(oldest)
            while self._land_next() is not oldest:
                pass

    def settle(self, last: Mark) -> Mark:
        """See `HostClock.settle`."""
        if self._flights:
            here = self.mark()
            wait_for(here)
            self._events.append(here)
            while self._flights:
                self._land_next()
        last.record(self._lane.compute)
        self._landed_s = perf_counter()
        return last

    def _land_next(self) -> Event | None:
        """Take what the oldest flight has brought; returns its mark."""
        flight = self._flights.popleft()
        if flight.mark is not None:
            self._counts[flight.kind] -= 1
        flight.land(*flight.given)
        self._events += flight.spent
        return flight.mark

    def _new_page(self) -> Tensor:
        with QUIET:
            return self._lane.pinned((PAGE,), torch.float64)
