"""Meters: what the host's clock and what events on a device make of the same steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flowdp.collective.base import Averaging
from flowdp.device.streams import CudaLane, HostLane
from flowdp.engine import meter as module
from flowdp.engine.meter import PAGE, STEPS_AHEAD, DeviceMeter, HostMeter, Meter, Report, open_meter
from flowdp.machine.worker import Done
from tests.fakes import FakeCuda, FakeEvent

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def lane(cuda: FakeCuda) -> CudaLane:
    return CudaLane(CPU, cuda)


@pytest.fixture(params=["host", "device"])
def meter(request: pytest.FixtureRequest, lane: CudaLane) -> Meter:
    return HostMeter() if request.param == "host" else DeviceMeter(lane)


def steps(meter: Meter, *losses: float, samples: int = 4) -> None:
    for loss in losses:
        meter.begin(0.0)
        meter.end(torch.tensor(loss), samples)


def closed(meter: Meter, count: int) -> Report:
    reports: list[Report] = []
    meter.close(Done(0, 3, count), 0.1, reports.append)
    meter.settle()
    (report,) = reports
    return report


def test_the_lane_decides(lane: CudaLane) -> None:
    assert type(open_meter(HostLane(CPU))) is HostMeter
    assert type(open_meter(lane)) is DeviceMeter


def test_losses_and_scalars_are_summed_by_samples_and_weights(meter: Meter) -> None:
    meter.begin(0.0)
    meter.scalar("accuracy", torch.tensor(0.5), 4.0)
    meter.scalar("host", 3.0, 2.0)
    meter.end(torch.tensor(2.0), 4)
    meter.begin(0.0)
    meter.scalar("accuracy", torch.tensor([1], dtype=torch.int32), 1.0)
    meter.scalar("host", 1.0, 1.0)
    meter.end(torch.tensor(1.0), 1)
    work = closed(meter, 2).work
    assert work.losses == (9.0, 5)
    assert work.scalars == {"accuracy": (3.0, 5.0), "host": (7.0, 3.0)}
    assert (work.epoch, work.steps, work.samples, work.lr) == (3, 2, 5, 0.1)


def test_orders_do_not_mix(meter: Meter) -> None:
    reports: list[Report] = []
    for order in range(5):
        steps(meter, *[float(order)] * 2)
        meter.close(Done(order, 0, 2), 0.1, reports.append)
    meter.settle()
    assert [report.work.losses for report in reports] == [(8.0 * order, 8) for order in range(5)]


def test_an_order_without_steps_reports_nothing_done(meter: Meter) -> None:
    work = closed(meter, 0).work
    assert (work.busy_ms, work.pace_ms, work.losses, dict(work.scalars)) == (0.0, 0.0, (0.0, 0), {})


def test_facts_keep_their_order(meter: Meter) -> None:
    told: list[str] = []
    steps(meter, 1.0)
    meter.close(Done(0, 0, 1), 0.1, lambda report: told.append("first order"))
    meter.then(lambda: told.append("snapshot"))
    steps(meter, 1.0)
    meter.close(Done(1, 0, 1), 0.1, lambda report: told.append("second order"))
    meter.settle()
    assert told == ["first order", "snapshot", "second order"]


def test_a_round_without_averaging_was_all_waiting(meter: Meter) -> None:
    steps(meter, 1.0)
    meter.meet()
    meter.met(lambda: Averaging(0.0, None))
    report = closed(meter, 1)
    assert report.averaging == Averaging(0.0, None)
    assert report.wait_ms > 0


def test_averaging_is_no_waiting(meter: Meter) -> None:
    meter.meet()
    meter.met(lambda: Averaging(1e6, 0.25))
    report = closed(meter, 0)
    assert report.averaging == Averaging(1e6, 0.25)
    assert report.wait_ms == 0.0


def test_waits_for_data_are_told_apart_on_the_host() -> None:
    meter = HostMeter()
    meter.waited(0.5)
    meter.waited(0.25)
    steps(meter, 1.0)
    assert closed(meter, 1).work.data_ms == pytest.approx(750.0)


# ---------------------------------------------------------------- the device's
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


def test_busy_is_in_steps_and_data_between_them(lane: CudaLane, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = DeviceMeter(lane)
    for gap_ms, step_ms in ((5.0, 100.0), (1.0, 20.0), (3.0, 20.0)):
        clock.passes(gap_ms)
        meter.begin(0.0)
        clock.passes(step_ms)
        meter.end(torch.tensor(1.0), 1)
    clock.passes(30.0)  # others are late
    clock.passes(7.0)
    meter.met(lambda: Averaging(7.0, None))
    report = closed(meter, 3)
    assert report.work.busy_ms == pytest.approx(140.0)
    assert report.work.data_ms == pytest.approx(9.0)
    assert report.work.pace_ms == pytest.approx((149.0 - 105.0) / 2)
    assert report.wait_ms == pytest.approx(30.0)


def test_a_wait_between_two_settles_is_nobodys(lane: CudaLane, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = DeviceMeter(lane)
    meter.settle()
    clock.passes(1000.0)  # without an order
    meter.settle()
    clock.passes(2.0)
    steps(meter, 1.0)
    assert closed(meter, 1).work.data_ms == pytest.approx(2.0)


def test_the_host_stays_three_steps_ahead_and_no_more(
    lane: CudaLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = DeviceMeter(lane)
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


def test_reports_come_without_waiting_when_later_steps_land(lane: CudaLane) -> None:
    meter = DeviceMeter(lane)
    reports: list[Report] = []
    steps(meter, 1.0)
    meter.close(Done(0, 0, 1), 0.1, reports.append)
    steps(meter, *[1.0] * STEPS_AHEAD)
    assert not reports  # its step has landed, the page behind it may not have
    steps(meter, 1.0)
    assert len(reports) == 1


def test_rounds_without_steps_are_read_in_time(lane: CudaLane) -> None:
    meter = DeviceMeter(lane)
    read: list[int] = []

    def reading(round: int) -> Averaging:
        read.append(round)
        return Averaging(0.0, None)

    for round in range(20):
        meter.meet()
        meter.met(partial(reading, round))
        assert round - len(read) < STEPS_AHEAD
    assert read == list(range(len(read)))


def test_nobody_waits_at_the_gate_with_a_report_in_the_pocket(lane: CudaLane) -> None:
    meter = DeviceMeter(lane)
    reports: list[Report] = []
    steps(meter, 1.0)
    meter.close(Done(0, 0, 1), 0.1, reports.append)
    steps(meter, 1.0)
    meter.meet()
    assert len(reports) == 1


def test_nothing_is_read_back_on_the_step_path(lane: CudaLane, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = DeviceMeter(lane)

    def refuse(tensor: torch.Tensor) -> float:
        raise AssertionError("read back")

    monkeypatch.setattr(torch.Tensor, "item", refuse)
    for _ in range(10):
        meter.begin(0.0)
        meter.scalar("accuracy", torch.tensor(1.0), 4.0)
        meter.end(torch.tensor(2.0), 4)
    assert closed(meter, 10).work.scalars == {"accuracy": (40.0, 40.0)}


@pytest.mark.parametrize("names", [1, 5])
def test_a_full_page_makes_room(lane: CudaLane, names: int) -> None:
    meter = DeviceMeter(lane)
    count = 2 * PAGE + 10
    for step in range(count):
        meter.begin(0.0)
        for name in range(names):
            meter.scalar(f"s{name}", torch.tensor(float(name)), 1.0)
        meter.end(torch.tensor(float(step)), 2)
    work = closed(meter, count).work
    assert work.losses == (float(count * (count - 1)), 2 * count)
    assert work.scalars == {f"s{name}": (float(name * count), float(count)) for name in range(names)}


def test_pages_are_used_again(lane: CudaLane, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = DeviceMeter(lane)
    made = []
    make = DeviceMeter._new_page
    monkeypatch.setattr(DeviceMeter, "_new_page", lambda self: made.append(make(self)) or made[-1])
    for order in range(50):
        steps(meter, *[float(order)] * 4)
        meter.close(Done(order, 0, 4), 0.1, lambda report: None)
    assert not made
    meter.settle()
    assert len(meter._pages) == 1


def test_events_are_used_again(lane: CudaLane, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = DeviceMeter(lane)
    made: list[FakeEvent] = []
    make = cuda.Event
    monkeypatch.setattr(cuda, "Event", lambda **kw: made.append(make(**kw)) or made[-1])
    for _ in range(100):
        steps(meter, 1.0, 1.0)
        meter.met(lambda: Averaging(0.0, None))
        meter.settle()
    assert len(made) <= 2 * STEPS_AHEAD + 2


def test_pages_are_free_of_races(cuda: FakeCuda, lane: CudaLane, monkeypatch: pytest.MonkeyPatch) -> None:
    make = DeviceMeter._new_page

    def watched(self: DeviceMeter) -> module._Page:
        page = make(self)
        cuda.watch("a page", page.device)
        return page

    monkeypatch.setattr(DeviceMeter, "_new_page", watched)
    with lane.on(lane.compute):
        meter = DeviceMeter(lane)
        for order in range(20):
            steps(meter, *[float(order)] * 3)
            meter.close(Done(order, 0, 3), 0.1, lambda report: None)
        meter.settle()
    assert not cuda.races
