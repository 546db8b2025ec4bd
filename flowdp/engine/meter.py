"""What a rank's steps cost and yielded, measured where they run.

A CPU rank is measured by the host's clock, step by step. On CUDA the host is ahead of the device: losses stay
in a page of device memory, times are events on the compute stream, and both are read behind the device's
back, when a later step shows that they are there. So nothing on the step path waits for the device, but for
the one bound that it needs anyway: the host may be `STEPS_AHEAD` steps ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import Averaging, Reading
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.machine.worker import Done
from flowdp.messages import Work
from flowdp.policy.tally import pace_ms

__all__ = ["PAGE", "STEPS_AHEAD", "DeviceMeter", "HostMeter", "Meter", "Report", "open_meter"]

STEPS_AHEAD = 3
"""Steps that lie on a device at most: enough that it never waits for the host, few enough that an order to
stop is obeyed soon and the driver's queue never fills, which would block the host inside a launch."""

PAGE = 512
"""Numbers that a device keeps before it hands them over: one for each loss, one for each scalar's sum."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured for an order.

    Attributes:
        work: Of all its steps.
        wait_ms: In the gate waiting for others, all rounds together.
        averaging: Of the last round; None without one.
    """

    work: Work
    wait_ms: float
    averaging: Averaging | None


@dataclass(slots=True)
class _Sums:
    """What an order has come to so far."""

    steps: int = 0
    samples: int = 0
    busy_ms: float = 0.0
    data_ms: float = 0.0
    wait_ms: float = 0.0
    longest_ms: float = 0.0  # of one step, with its wait for data
    loss: float = 0.0
    scalars: dict[str, list[float]] = field(default_factory=dict)
    averaging: Averaging | None = None

    def scalar(self, name: str, total: float, weight: float) -> None:
        sums = self.scalars.setdefault(name, [0.0, 0.0])
        sums[0] += total
        sums[1] += weight

    def report(self, done: Done, lr: float) -> Report:
        work = Work(
            epoch=done.epoch,
            steps=done.steps,
            samples=self.samples,
            busy_ms=self.busy_ms,
            data_ms=self.data_ms,
            pace_ms=pace_ms(self.busy_ms + self.data_ms, self.longest_ms, self.steps),
            losses=(self.loss, self.samples),
            scalars={name: (total, weight) for name, (total, weight) in self.scalars.items()},
            lr=lr,
        )
        return Report(work, self.wait_ms, self.averaging)


class Meter(ABC):
    """Measures one rank.

    Every step is `begin`, then `end`; every round `meet`, then `met`; every order ends with `close`.

    Threads:
        The worker's own.
    """

    def __init__(self) -> None:
        self._sums = _Sums()

    @abstractmethod
    def begin(self, start_s: float) -> None:
        """The next step is about to be put on the device, its batch is there.

        Args:
            start_s: When the host began to get the batch, by `perf_counter`.
        """

    @abstractmethod
    def end(self, loss: Tensor, samples: int) -> None:
        """The step is on the device.

        Args:
            loss: Mean over the batch, detached. Shape [].
            samples: Of the batch.
        """

    def waited(self, seconds: float) -> None:  # noqa: B027 - a device sees for itself when it has nothing to do
        """The host waited this long for the batch of the next step."""

    def scalar(self, name: str, value: float | Tensor, weight: float) -> None:
        """Count a number towards a mean."""
        number = value.item() if isinstance(value, Tensor) else value
        self._sums.scalar(name, number * weight, weight)

    @abstractmethod
    def meet(self) -> None:
        """The rank goes into the gate."""

    @abstractmethod
    def met(self, reading: Reading) -> None:
        """The mean of the round is on its way.

        Args:
            reading: What it cost and found.
        """

    @abstractmethod
    def close(self, done: Done, lr: float, post: Callable[[Report], None]) -> None:
        """An order has ended; the next step belongs to another.

        Args:
            done: Which, and its steps.
            lr: Learning rate of its last step.
            post: Called with the report, at once or in a later call of this meter.
        """

    def then(self, post: Callable[[], None]) -> None:
        """Call something when everything before it has been reported: the order of facts is that of deeds."""
        post()

    def settle(self) -> None:  # noqa: B027 - there is nothing to wait for
        """Wait for the device and report what is due, before the thread waits for a message.

        Called again behind a wait, that wait counts as nobody's.
        """


def open_meter(lane: Lane) -> Meter:
    """The meter for a rank on this lane."""
    return DeviceMeter(lane) if lane.is_async else HostMeter()


class HostMeter(Meter):
    """Measures a rank whose work is done when the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self._start_s = 0.0
        self._waited_s = 0.0

    def begin(self, start_s: float) -> None:
        """See `Meter.begin`."""
        self._start_s = start_s

    def end(self, loss: Tensor, samples: int) -> None:
        """See `Meter.end`."""
        sums = self._sums
        sums.loss += loss.item() * samples
        sums.samples += samples
        sums.steps += 1
        spent_ms = (perf_counter() - self._start_s) * 1e3
        sums.busy_ms += spent_ms
        if self._waited_s:
            sums.data_ms += self._waited_s * 1e3
            spent_ms += self._waited_s * 1e3
            self._waited_s = 0.0
        if spent_ms > sums.longest_ms:
            sums.longest_ms = spent_ms

    def waited(self, seconds: float) -> None:
        """See `Meter.waited`."""
        self._waited_s += seconds

    def meet(self) -> None:
        """See `Meter.meet`."""
        self._start_s = perf_counter()

    def met(self, reading: Reading) -> None:
        """See `Meter.met`: whatever of this was not averaging was waiting, here or for the last arrival."""
        averaging = self._sums.averaging = reading()
        self._sums.wait_ms += max(0.0, (perf_counter() - self._start_s) * 1e3 - averaging.sync_ms)

    def close(self, done: Done, lr: float, post: Callable[[Report], None]) -> None:
        """See `Meter.close`."""
        sums, self._sums = self._sums, _Sums()
        post(sums.report(done, lr))


@dataclass(slots=True)
class _Page:
    """Numbers of one order, on the device and, behind it, on the host.

    Losses fill it from the front, sums of scalars from the back.
    """

    device: Tensor
    cells: tuple[Tensor, ...]
    host: Tensor
    losses: list[int] = field(default_factory=list)  # samples of each
    scalars: dict[str, tuple[int, float]] = field(default_factory=dict)  # name -> (cell, sum of weights)

    @property
    def is_full(self) -> bool:
        return len(self.losses) + len(self.scalars) >= PAGE


@dataclass(slots=True)
class _Flight:
    """Something that the device has yet to pass, and what to do then."""

    land: Callable[[], None]
    passed: Event | None = None  # of a step or a round; anything else is passed when a later one is


class DeviceMeter(Meter):
    """Measures a rank whose device works behind its host.

    Args:
        lane: The rank's; its compute stream is current where this is called.
    """

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane
        self._flights: deque[_Flight] = deque()
        self._steps = self._rounds = self._owes = 0  # among them; `_owes` are facts to post
        self._events: list[Event] = []
        self._pages = [self._new_page(), self._new_page()]
        self._page = self._pages.pop()
        self._begin = self._mark()  # of the step under way
        self._last = self._mark()  # up to here the device's time is counted

    def begin(self, start_s: float) -> None:  # noqa: ARG002 - the device has its own time
        """See `Meter.begin`; waits until the device is less than `STEPS_AHEAD` steps behind."""
        while self._steps >= STEPS_AHEAD:
            self._land_next()
        self._begin = self._mark()

    def end(self, loss: Tensor, samples: int) -> None:
        """See `Meter.end`."""
        page, sums = self._page_with_room(), self._sums
        page.cells[len(page.losses)].copy_(loss)
        page.losses.append(samples)
        sums.samples += samples
        sums.steps += 1
        last, begin, end = self._last, self._begin, self._mark()
        self._last = end

        def land() -> None:
            # Between two steps the device had nothing to do: it waited for data, or for the host.
            busy_ms, data_ms = begin.elapsed_time(end), last.elapsed_time(begin)
            sums.busy_ms += busy_ms
            sums.data_ms += data_ms
            sums.longest_ms = max(sums.longest_ms, busy_ms + data_ms)
            self._events += (last, begin)
            self._steps -= 1

        self._steps += 1
        self._flights.append(_Flight(land, end))

    def scalar(self, name: str, value: float | Tensor, weight: float) -> None:
        """See `Meter.scalar`; a tensor of the device stays there."""
        if not isinstance(value, Tensor) or value.device != self._lane.device:
            super().scalar(name, value, weight)
            return
        page, value = self._page, value.detach().reshape(())
        if name in page.scalars:
            index, weights = page.scalars[name]
            page.cells[index].add_(value, alpha=weight)
        else:
            page = self._page_with_room()
            index, weights = PAGE - 1 - len(page.scalars), 0.0
            page.cells[index].copy_(value).mul_(weight)
        page.scalars[name] = index, weights + weight

    def meet(self) -> None:
        """See `Meter.meet`; rounds without steps are bounded as steps are.

        Others may be awaited long, and nobody plans further while a report is missing: one that no step of
        this round has brought, because it had so few, is fetched.
        """
        if self._owes:
            self.settle()
        while self._rounds >= STEPS_AHEAD:
            self._land_next()

    def met(self, reading: Reading) -> None:
        """See `Meter.met`; the mark lies behind the compute stream's wait for the mean."""
        sums, last, resumed = self._sums, self._last, self._mark()
        self._last = resumed

        def land() -> None:
            averaging = sums.averaging = reading()
            sums.wait_ms += max(0.0, last.elapsed_time(resumed) - averaging.sync_ms)
            self._events.append(last)
            self._rounds -= 1

        self._rounds += 1
        self._flights.append(_Flight(land, resumed))

    def close(self, done: Done, lr: float, post: Callable[[Report], None]) -> None:
        """See `Meter.close`; the report follows when the device has passed the order's last step."""
        self._hand_over()
        sums, self._sums = self._sums, _Sums()
        self.then(lambda: post(sums.report(done, lr)))

    def then(self, post: Callable[[], None]) -> None:
        """See `Meter.then`."""

        def land() -> None:
            self._owes -= 1
            post()

        self._owes += 1
        self._flights.append(_Flight(land))

    def settle(self) -> None:
        """See `Meter.settle`."""
        if self._flights:
            here = self._mark()
            here.synchronize()
            self._events.append(here)
            while self._flights:
                self._flights.popleft().land()
        self._last.record(self._lane.compute)

    def _land_next(self) -> None:
        """Wait for the oldest step or round in flight, and read what the device has passed with it."""
        flights = self._flights
        oldest = next(flight.passed for flight in flights if flight.passed is not None)
        oldest.synchronize()
        landed = None
        while landed is not oldest:
            flight = flights.popleft()
            flight.land()
            landed = flight.passed

    def _page_with_room(self) -> _Page:
        """The page of this order, with a free cell."""
        if self._page.is_full:
            self._hand_over()
        return self._page

    def _hand_over(self) -> None:
        """Send the page to the host behind what is on the stream, and go on with another."""
        page, sums = self._page, self._sums
        if not page.losses and not page.scalars:
            return
        page.host.copy_(page.device, non_blocking=True)

        def land() -> None:
            numbers = page.host.tolist()
            sums.loss += sum(loss * samples for loss, samples in zip(numbers, page.losses, strict=False))
            for name, (index, weight) in page.scalars.items():
                sums.scalar(name, numbers[index], weight)
            page.losses.clear()
            page.scalars.clear()
            self._pages.append(page)

        self._flights.append(_Flight(land))
        self._page = self._pages.pop() if self._pages else self._new_page()

    def _new_page(self) -> _Page:
        device = torch.zeros(PAGE, dtype=torch.float64, device=self._lane.device)
        with QUIET:
            host = self._lane.pinned((PAGE,), torch.float64)
        return _Page(device, device.unbind(), host)

    def _mark(self) -> Event:
        event = self._events.pop() if self._events else self._lane.event(timing=True)
        event.record(self._lane.compute)
        return event
