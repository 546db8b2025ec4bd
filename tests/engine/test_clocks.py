"""Tests of a meter whose clock is a device's: times by events, without waits for them."""

from __future__ import annotations

import pytest
import torch

from flowdp.collective.base import Averaging
from flowdp.device.streams import StreamLane
from flowdp.engine.clocks import PAGE, STEPS_AHEAD, DeviceClock
from flowdp.engine.meter import Meter, OrderSums
from flowdp.machine.worker import Step
from tests.engine.test_meter import closed, steps
from tests.fakes import FakeCuda, FakeEvent

CPU = torch.device("cpu")
STEP = Step(0, (0,), 0)


class Clock:
    """Sets the times of events: the device takes as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        record = FakeEvent.record

        def timed(event: FakeEvent, stream: object = None) -> None:
            record(event, stream)  # type: ignore[arg-type]
            event.at_s = self.now_s

        monkeypatch.setattr(FakeEvent, "record", timed)

    def passes(self, ms: float) -> None:
        self.now_s += ms / 1e3


def test_busy_is_in_steps_and_data_between_them(lane: StreamLane, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = Meter(lane)
    for gap_ms, step_ms in ((5.0, 100.0), (1.0, 20.0), (3.0, 20.0)):
        clock.passes(gap_ms)
        meter.begin(0.0)
        clock.passes(step_ms)
        meter.end(torch.tensor(1.0), 1, STEP)
    clock.passes(30.0)  # others are late
    clock.passes(7.0)
    meter.met(lambda: Averaging(7.0, None))
    report = closed(meter, 3)
    assert report.work.busy_ms == pytest.approx(140.0)
    assert report.work.data_ms == pytest.approx(9.0)
    assert report.work.pace_ms == pytest.approx((149.0 - 105.0) / 2)
    assert report.wait_ms == pytest.approx(30.0)


def test_the_step_behind_a_mean_is_work(lane: StreamLane, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = Meter(lane)
    for _ in range(2):
        meter.begin(0.0)
        clock.passes(10.0)
        meter.end(torch.tensor(1.0), 1, STEP)
        clock.passes(5.0)
        meter.met(lambda: Averaging(2.0, None))
        clock.passes(4.0)
        meter.stepped()
    report = closed(meter, 2)
    assert report.work.busy_ms == pytest.approx(28.0)
    assert report.work.data_ms == pytest.approx(0.0)
    assert report.wait_ms == pytest.approx(6.0)


def test_the_host_stays_three_steps_ahead_and_no_more(
    lane: StreamLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(lane)
    awaited: list[FakeEvent] = []
    synchronize = FakeEvent.synchronize

    def watched(event: FakeEvent) -> None:
        awaited.append(event)
        synchronize(event)

    monkeypatch.setattr(FakeEvent, "synchronize", watched)
    steps(meter, *[1.0] * STEPS_AHEAD)
    assert not awaited
    steps(meter, 1.0, 1.0)
    assert len(awaited) == 2


def test_reports_come_without_waiting_when_later_steps_land(lane: StreamLane) -> None:
    meter = Meter(lane)
    reports: list[OrderSums] = []
    steps(meter, 1.0)
    meter.close(reports.append)
    steps(meter, *[1.0] * STEPS_AHEAD)
    assert not reports  # its step is complete, the page after it may not be
    steps(meter, 1.0)
    assert len(reports) == 1


def test_nothing_is_read_back_on_the_step_path(lane: StreamLane, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(lane)

    def refuse(tensor: torch.Tensor) -> float:
        raise AssertionError("read back")

    monkeypatch.setattr(torch.Tensor, "item", refuse)
    for _ in range(10):
        meter.begin(0.0)
        meter.scalar("accuracy", torch.tensor(1.0), 4.0)
        meter.end(torch.tensor(2.0), 4, STEP)
    assert closed(meter, 10).work.scalars == {"accuracy": (40.0, 40.0)}


@pytest.mark.parametrize("names", [1, 5])
def test_a_full_page_makes_room(lane: StreamLane, names: int) -> None:
    meter = Meter(lane)
    count = 2 * PAGE + 10
    for step in range(count):
        meter.begin(0.0)
        for name in range(names):
            meter.scalar(f"s{name}", torch.tensor(float(name)), 1.0)
        meter.end(torch.tensor(float(step)), 2, STEP)
    work = closed(meter, count).work
    assert work.losses == (float(count * (count - 1)), 2 * count)
    assert work.scalars == {f"s{name}": (float(name * count), float(count)) for name in range(names)}


def test_a_step_that_begins_again_may_have_filled_pages(lane: StreamLane) -> None:
    """More values than a page has cells, in a step whose first attempt recorded still more."""
    meter = Meter(lane)
    names = [f"s{number}" for number in range(PAGE + 10)]

    def record(count: int, value: float) -> None:
        for name in names[:count]:
            meter.scalar(name, torch.tensor(value), 1.0)

    meter.begin(0.0)
    record(PAGE - 5, 1.0)
    meter.end(torch.tensor(1.0), 1, STEP)
    meter.begin(0.0)
    record(PAGE + 10, 100.0)
    meter.discard()
    record(PAGE + 5, 10.0)
    meter.end(torch.tensor(2.0), 1, STEP)
    work = closed(meter, 2).work
    assert work.losses == (3.0, 2)
    both, later = dict.fromkeys(names[: PAGE - 5], (11.0, 2.0)), names[PAGE - 5 : PAGE + 5]
    assert work.scalars == both | dict.fromkeys(later, (10.0, 1.0))


def test_nobody_waits_for_the_losses_but_who_looks(lane: StreamLane) -> None:
    meter = Meter(lane)
    meter.begin(0.0)
    meter.end(torch.tensor(float("nan")), 1, STEP)
    assert not meter.bad
    meter.look()
    assert meter.bad == {0: STEP}


def test_numbers_on_their_way_are_free_of_races(
    cuda: FakeCuda, lane: StreamLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = DeviceClock._new_page

    def watched(self: DeviceClock) -> torch.Tensor:
        page = make(self)
        cuda.watch("a page", page)
        return page

    monkeypatch.setattr(DeviceClock, "_new_page", watched)
    with lane.on(lane.compute):
        meter = Meter(lane)
        for order in range(20):
            for _ in range(3):
                meter.begin(0.0)
                meter.scalar("name", torch.tensor(1.0), 1.0)
                meter.discard()
                meter.end(torch.tensor(float(order)), 1, STEP)
            meter.close(lambda report: None)
        meter.settle()
    assert not cuda.races


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_losses_are_seen_once_and_where_they_lie(lane: StreamLane, bad: float) -> None:
    """Among other values of their step, over several pages, and not those of the round before."""
    meter = Meter(lane)
    assert meter.losses() is None
    for count in (2, PAGE + 3, 1):
        for wrong in (None, 0, count - 1):
            for step in range(count):
                meter.begin(0.0)
                meter.scalar("odd", torch.tensor(bad), 1.0)
                loss = torch.tensor(bad if step == wrong else 2.0)
                meter.end(loss, 1, STEP, [torch.tensor(bad)], torch.tensor(3.0))
            seen = meter.losses()
            assert seen is not None
            assert bool(seen.isfinite()) == (wrong is None)
            assert meter.losses() is None
            meter.round += 1
    report = closed(meter, 0)
    assert sorted(meter.bad) == [1, 2, 4, 5, 7, 8]
    sound = 3 * (2 + PAGE + 3 + 1) - 6
    assert report.work.losses == (2.0 * 3.0 * sound, 3.0 * sound)
    assert report.work.norms == (0.0, 0.0, 0)


def test_a_report_in_the_pocket_is_fetched_while_the_device_goes_on(
    lane: StreamLane, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lane.on(lane.compute):
        meter = Meter(lane)
        reports: list[OrderSums] = []
        steps(meter, 1.0)
        meter.close(reports.append)
        steps(meter, 1.0)
        passed: list[int] = []
        synchronize = FakeEvent.synchronize

        def watched(event: FakeEvent) -> None:
            passed.append(event.clock[lane.compute.number])
            synchronize(event)

        monkeypatch.setattr(FakeEvent, "synchronize", watched)
        meter.meet()
        assert len(reports) == 1
        assert max(passed) < lane.compute.time  # the second step comes after the awaited one
