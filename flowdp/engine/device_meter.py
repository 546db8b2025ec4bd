"""Step times and losses on a device that runs behind its host.

Losses stay in a page of device memory, times are events on the compute stream, and both are read behind the
device's back, when a later step shows that they are there. So nothing on the step path waits for the device,
but for the one bound that it needs anyway: the host may be `STEPS_AHEAD` steps ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import Reading
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.engine.meter import Meter, OrderSums
from flowdp.machine.worker import Step
from flowdp.policy.capture_plan import LaunchWatch
from flowdp.policy.efficiency import Activity
from flowdp.timeline.spans import RankSpans

__all__ = ["PAGE", "STEPS_AHEAD", "DeviceMeter", "open_meter"]

STEPS_AHEAD = 3
"""Steps that lie on a device at most: enough that it never waits for the host, few enough that an order to
stop is obeyed soon and the driver's queue never fills, which would block the host inside a launch."""

PAGE = 512
"""Numbers that a device keeps before it hands them over: one for each loss, one for each scalar's sum."""


def open_meter(
    lane: Lane,
    watch: LaunchWatch | None = None,
    spans: RankSpans | None = None,
) -> Meter:
    """The meter for a rank on this lane; see `DeviceMeter`."""
    return DeviceMeter(lane, watch, spans) if lane.is_async else Meter(spans)


@dataclass(slots=True)
class _Page:
    """Numbers of one order, on the device and, behind it, on the host.

    Losses fill it from the front, one behind the other; all else from the back.

    Attributes:
        losses: Samples, step, round, and whether a weight was kept before it.
        weights: Samples and cell.
        norms: Cells.
        scalars: Name -> cell, sum of weights.
        others: Cells that the last three have taken.
        seen: Losses that `DeviceMeter.losses` has seen.
    """

    device: Tensor
    cells: tuple[Tensor, ...]
    host: Tensor
    losses: list[tuple[int, Step, int, bool]] = field(default_factory=list)
    weights: list[tuple[int, int]] = field(default_factory=list)
    norms: list[int] = field(default_factory=list)
    scalars: dict[str, tuple[int, float]] = field(default_factory=dict)
    others: int = 0
    seen: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.losses) + self.others >= PAGE

    def other(self) -> int:
        """A cell from the back."""
        self.others += 1
        return PAGE - self.others

    def clear(self) -> None:
        for kept in (self.losses, self.weights, self.norms):
            kept.clear()
        self.scalars = {}
        self.others = self.seen = 0


@dataclass(slots=True)
class _Flight:
    """Event that the device has yet to pass, and the action to take then."""

    land: Callable[[], None]
    passed: Event | None = None  # of a page none: it is passed when a later one is


class DeviceMeter(Meter):
    """Meter of a rank whose device runs behind its host.

    Args:
        lane: Lane of the rank; its compute stream is current at each call.
        watch: Takes the times of its steps, to decide whether they are captured; None: that is decided.
        spans: Recorder of the rank's spans; None: the run has no timeline.
    """

    def __init__(self, lane: Lane, watch: LaunchWatch | None = None, spans: RankSpans | None = None) -> None:
        super().__init__(spans)
        self._watch = watch
        self._begin_s = 0.0  # of the step under way, by the host's clock
        self._lane = lane
        self._flights: deque[_Flight] = deque()
        self._steps = self._rounds = self._owes = 0  # among them; `_owes` are facts to post
        self._events: list[Event] = []
        self._pages = [self._new_page(), self._new_page()]
        self._page = self._pages.pop()
        self._full: list[_Page] = []  # of the step under way, before the page
        self._saved = torch.zeros_like(self._page.device)  # the page's cells when the step began
        self._saved_scalars: dict[str, tuple[int, float]] = {}
        self._saved_others = 0
        self._weights: deque[float] = deque()  # of the losses that land next
        self._odd: Tensor | None = None  # see `losses`: of pages that were left
        self._begin = self._mark()  # of the step under way
        self._last = self._mark()  # up to here the device's time is counted
        # When the device passed the last mark that has landed, by the host's clock: set where the host has
        # waited for it, and carried on by the times between two marks.
        self._landed_s = perf_counter()

    def begin(self, _start_s: float) -> None:  # the device has its own time
        """See `Meter.begin`; waits until the device is less than `STEPS_AHEAD` steps behind."""
        while self._steps >= STEPS_AHEAD:
            self._land_next()
        self._begin_s = perf_counter()
        self._begin = self._mark()
        if self._open:
            self._count_recorded()
        self._saved_scalars, self._saved_others = dict(self._page.scalars), self._page.others
        if self._saved_scalars:
            self._saved.copy_(self._page.device)

    def end(
        self,
        loss: Tensor | None,
        samples: int,
        step: Step,
        norms: Sequence[Tensor] = (),
        weight: Tensor | None = None,
    ) -> None:
        """See `Meter.end`."""
        sums = self._sums
        if loss is not None:
            if weight is not None:
                page, cell = self._keep(weight)
                page.weights.append((samples, cell))
            page = self._page_with_room()
            page.cells[len(page.losses)].copy_(loss)
            page.losses.append((samples, step, self.round, weight is not None))
        for norm in norms:
            page, cell = self._keep(norm)
            page.norms.append(cell)
        if self._open:
            self._count_recorded()
        if self._full:
            self._hand_over_full()
        sums.samples += samples
        sums.steps += 1
        last, begin, end = self._last, self._begin, self._mark()
        self._last = end
        launch_ms = (perf_counter() - self._begin_s) * 1e3

        def land() -> None:
            # Between two steps the device had nothing to do: it waited for data, or for the host.
            busy_ms, data_ms = begin.elapsed_time(end), last.elapsed_time(begin)
            sums.busy_ms += busy_ms
            sums.data_ms += data_ms
            sums.longest_ms = max(sums.longest_ms, busy_ms + data_ms)
            self._landed(Activity.DATA, data_ms)
            self._landed(Activity.STEP, busy_ms)
            if self._watch is not None:
                self._watch.take(launch_ms, busy_ms)
            self._events += (last, begin)
            self._steps -= 1

        self._steps += 1
        self._flights.append(_Flight(land, end))

    def waited(self, seconds: float) -> None:
        """Do nothing: a device sees for itself when it has nothing to do."""

    def discard(self) -> None:
        """See `Meter.discard`."""
        super().discard()
        self._full.append(self._page)
        self._page, *later = self._full
        self._full.clear()
        for page in later:
            page.clear()
            self._pages.append(page)
        self._page.scalars, self._page.others = dict(self._saved_scalars), self._saved_others
        if self._saved_scalars:
            self._page.device.copy_(self._saved)

    def send(self) -> None:
        """See `Meter.send`."""
        self._hand_over()

    def look(self) -> None:
        """See `Meter.look`."""
        self._hand_over()
        self.settle()

    def losses(self) -> Tensor | None:
        """See `Meter.losses`."""
        self._see(self._page)
        odd, self._odd = self._odd, None
        return odd

    def scalar(self, name: str, value: float | Tensor, weight: float) -> None:
        """See `Meter.scalar`; a tensor of the device stays there."""
        if not weight or not isinstance(value, Tensor) or value.device != self._lane.device:
            super().scalar(name, value, weight)
            return
        page, value = self._page, value.detach().reshape(())
        if name in page.scalars:
            index, weights = page.scalars[name]
            page.cells[index].add_(value, alpha=weight)
        else:
            page = self._page_with_room()
            index, weights = page.other(), 0.0
            page.cells[index].copy_(value).mul_(weight)
        page.scalars[name] = index, weights + weight

    def meet(self) -> None:
        """See `Meter.meet`; rounds without steps are bounded as steps are.

        The wait for other ranks may be long, and planning stops while a report is missing: one that no step
        of this round has brought, because it had so few, is fetched. Its steps go on on the device meanwhile.
        """
        while self._owes:
            self._land_next()
        while self._rounds >= STEPS_AHEAD:
            self._land_next()

    def met(self, reading: Reading) -> None:
        """See `Meter.met`; the mark lies behind the compute stream's wait for the mean."""
        sums, last, resumed = self._sums, self._last, self._mark()
        self._last = resumed

        def land() -> None:
            averaging = sums.averaging = reading()
            wait_ms = max(0.0, last.elapsed_time(resumed) - averaging.sync_ms)
            sums.wait_ms += wait_ms
            sums.sync_ms += averaging.sync_ms
            self._landed(Activity.GATE, wait_ms)
            self._landed(Activity.AVERAGE, averaging.sync_ms)
            self._events.append(last)
            self._rounds -= 1

        self._rounds += 1
        self._flights.append(_Flight(land, resumed))

    def stepped(self, norms: Sequence[Tensor] = ()) -> None:
        """See `Meter.stepped`."""
        for norm in norms:
            page, cell = self._keep(norm)
            page.norms.append(cell)
        if self._full:
            self._hand_over_full()
        sums, last, end = self._sums, self._last, self._mark()
        self._last = end

        def land() -> None:
            busy_ms = last.elapsed_time(end)
            sums.busy_ms += busy_ms
            self._landed(Activity.STEP, busy_ms, count=0)
            self._events.append(last)

        self._flights.append(_Flight(land, end))

    def averaged(self, _start_s: float) -> None:  # the device has its own time
        """See `Meter.averaged`."""
        sums, last, end = self._sums, self._last, self._mark()
        self._last = end

        def land() -> None:
            sync_ms = last.elapsed_time(end)
            sums.sync_ms += sync_ms
            self._landed(Activity.AVERAGE, sync_ms)
            self._events.append(last)

        self._flights.append(_Flight(land, end))

    def close(self, post: Callable[[OrderSums], None]) -> None:
        """See `Meter.close`; the report follows when the device has passed the order's last step."""
        self._count_recorded()
        self._hand_over()
        sums, self._sums = self._sums, OrderSums()
        self.then(lambda: post(sums))

    def then(self, post: Callable[[], None]) -> None:
        """See `Meter.then`."""
        here = self._mark()

        def land() -> None:
            self._events.append(here)
            self._owes -= 1
            post()

        self._owes += 1
        self._flights.append(_Flight(land, here))

    def settle(self) -> None:
        """See `Meter.settle`."""
        if self._flights:
            here = self._mark()
            self.wait_for(here)
            self._events.append(here)
            while self._flights:
                self._flights.popleft().land()
        self._last.record(self._lane.compute)
        self._landed_s = perf_counter()

    def _landed(self, activity: Activity, ms: float, count: int = 1) -> None:
        """Record the time since the mark that landed before."""
        start_s, self._landed_s = self._landed_s, self._landed_s + ms / 1e3
        if self._spans is not None and ms > 0.0:
            self._spans.add(activity, start_s, self._landed_s, count)

    def _land_next(self) -> None:
        """Wait for the oldest mark in flight, and read all values that the device has passed with it."""
        flights = self._flights
        oldest = next(flight.passed for flight in flights if flight.passed is not None)
        self.wait_for(oldest)
        landed = None
        while landed is not oldest:
            flight = flights.popleft()
            flight.land()
            landed = flight.passed

    def _keep(self, number: Tensor) -> tuple[_Page, int]:
        """Leave the weight of a loss or a norm in the page, and say where."""
        page = self._page_with_room()
        cell = page.other()
        page.cells[cell].copy_(number)
        return page, cell

    def _see(self, page: _Page) -> None:
        if page.seen < len(page.losses):
            odd = page.device[page.seen : len(page.losses)].sum()
            self._odd = odd if self._odd is None else self._odd + odd
            page.seen = len(page.losses)

    def _page_with_room(self) -> _Page:
        """The page of this order, with a free cell."""
        if self._page.is_full:
            self._turn_page()
        return self._page

    def _turn_page(self) -> None:
        self._see(self._page)
        self._full.append(self._page)
        self._page = self._pages.pop() if self._pages else self._new_page()

    def _hand_over(self) -> None:
        """Send all pages to the host behind the work on the stream, and continue with a new page."""
        if self._page.losses or self._page.others:
            self._turn_page()
        self._hand_over_full()

    def _hand_over_full(self) -> None:
        for page in self._full:
            self._send(page)
        self._full.clear()

    def _send(self, page: _Page) -> None:
        sums = self._sums
        page.host.copy_(page.device, non_blocking=True)

        def land() -> None:
            numbers = page.host.tolist()
            self._weights += [numbers[cell] * samples for samples, cell in page.weights]
            for number, (samples, step, round, is_weighted) in zip(numbers, page.losses, strict=False):
                weight = self._weights.popleft() if is_weighted else samples
                if isfinite(number):
                    sums.loss += number * weight
                    sums.losses += weight
                else:
                    self.bad.setdefault(round, step)
            for cell in page.norms:
                sums.norm(numbers[cell])
            for name, (cell, total) in page.scalars.items():
                sums.scalar(name, numbers[cell], total)
            page.clear()
            self._pages.append(page)

        self._flights.append(_Flight(land))

    def _new_page(self) -> _Page:
        device = torch.zeros(PAGE, dtype=torch.float64, device=self._lane.device)
        with QUIET:
            host = self._lane.pinned((PAGE,), torch.float64)
        return _Page(device, device.unbind(), host)

    def _mark(self) -> Event:
        event = self._events.pop() if self._events else self._lane.event(timing=True)
        event.record(self._lane.compute)
        return event
