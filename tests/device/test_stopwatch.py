"""Tests of the stopwatch: laps by the device's clock, without waits unless too many are open."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flowdp.device import stopwatch
from flowdp.device.stopwatch import Stopwatch
from flowdp.device.streams import StreamLane
from tests.fakes import FakeCuda, FakeEvent
from tests.loops import CPU


class _Event(FakeEvent):
    """An event that the device passes on command, at a given time."""

    def __init__(self, cuda: Any, *args: Any) -> None:
        super().__init__(cuda, *args)
        self.passed = threading.Event()
        cuda.made.append(self)

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.at_s = next(self.cuda.clock_s)  # type: ignore[attr-defined]
        self.passed.clear()

    def synchronize(self) -> None:
        self.cuda.waits += 1  # type: ignore[attr-defined]
        if not self.passed.is_set():
            self.cuda.stalls += 1  # type: ignore[attr-defined]
            self.passed.set()
        super().synchronize()


class Clock(FakeCuda):
    """Events 1 ms, 2 ms, 3 ms, ... apart."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Event] = []
        self.clock_s = (n * (n + 1) / 2e3 for n in range(10**6))
        self.waits = self.stalls = 0

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return _Event(self, enable_timing, blocking)

    def catch_up(self) -> None:
        for event in self.made:
            event.passed.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Stopwatch:
    return Stopwatch(StreamLane(CPU, clock))


def run(watch: Stopwatch, pieces: int = 1) -> None:
    for _ in range(pieces):
        with watch.running():
            pass


def test_a_lap_is_the_sum_of_its_pieces(watch: Stopwatch, clock: Clock) -> None:
    run(watch, 2)  # 1 ms and 3 ms
    watch.lap()
    run(watch)  # 5 ms
    watch.lap()
    watch.lap()
    clock.catch_up()
    assert [watch.take_ms() for _ in range(3)] == pytest.approx([4.0, 5.0, 0.0])
    assert clock.stalls == 0


def test_a_lap_is_known_when_the_device_has_passed_it(watch: Stopwatch, clock: Clock) -> None:
    assert not watch.is_known
    run(watch)
    assert not watch.is_known
    watch.lap()
    assert not watch.is_known
    clock.catch_up()
    assert watch.is_known
    assert clock.waits == 0
    run(watch)
    watch.lap()
    assert watch.is_known, "the oldest lap counts"


def test_a_lap_without_pieces_is_known(watch: Stopwatch) -> None:
    watch.lap()
    assert watch.is_known
    assert watch.take_ms() == 0.0


def test_laps_that_pile_up_are_waited_for(
    watch: Stopwatch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch, "KEPT_LAPS", 2)
    for _ in range(2):
        run(watch)
        watch.lap()
        assert not watch.is_known
    run(watch)
    watch.lap()
    assert watch.is_known
    assert watch.take_ms() == pytest.approx(1.0)
    assert clock.stalls == 1
    assert not watch.is_known


def test_marks_lie_on_the_stream_that_is_current(clock: Clock) -> None:
    lane = StreamLane(CPU, clock)
    watch = Stopwatch(lane)
    with lane.on(lane.comm):
        run(watch)
    assert [(stream, verb) for stream, verb, _ in clock.log] == [(lane.comm.name, "records")] * 2
