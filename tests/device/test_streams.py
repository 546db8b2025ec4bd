"""Tests of lanes: streams made once, edges between them, and the same interface on the CPU."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch

from flowdp.device import streams
from flowdp.device.streams import HostLane, StreamLane, open_lanes
from tests.accelerators import FakeXpu
from tests.fakes import FakeCuda
from tests.watched import Watched, both

CPU = torch.device("cpu")


@pytest.fixture(params=[FakeCuda, FakeXpu])
def cuda(request: pytest.FixtureRequest) -> FakeCuda:
    """The device module of a fake CUDA device, and one with the interface of XPU's."""
    module: FakeCuda = request.param()
    return module


def test_a_lane_has_three_streams_and_averaging_goes_first(cuda: FakeCuda) -> None:
    lane = StreamLane(CPU, cuda)
    assert len({id(stream) for stream in (lane.compute, lane.comm, lane.copy)}) == 3
    assert (lane.comm.priority, lane.compute.priority, lane.copy.priority) == (-1, 0, 0)


def test_work_lands_on_the_stream_that_was_entered(cuda: FakeCuda) -> None:
    lane = StreamLane(CPU, cuda)
    with lane.on(lane.compute):
        with lane.on(lane.comm):
            assert cuda.current_stream() is lane.comm
        assert cuda.current_stream() is lane.compute
    assert cuda.current_stream() is cuda.default


def test_the_current_stream_is_the_threads_own(cuda: FakeCuda) -> None:
    lane = StreamLane(CPU, cuda)
    seen = []
    with lane.on(lane.compute):
        thread = threading.Thread(target=lambda: seen.append(cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [cuda.default]


@pytest.mark.parametrize("awaits", [True, False])
def test_an_edge_orders_two_streams(cuda: FakeCuda, awaits: bool) -> None:
    lane, memory = StreamLane(CPU, cuda), torch.zeros(8)
    cuda.watch("memory", memory)
    mark = lane.event()
    with lane.on(lane.compute):
        memory.add_(1)
    mark.record(lane.compute)
    if awaits:
        lane.comm.wait_event(mark)
    with lane.on(lane.comm):
        memory.mul_(2)
    assert bool(cuda.races) is not awaits


def test_what_the_user_enqueued_comes_before_the_run(cuda: FakeCuda) -> None:
    lane, memory = StreamLane(CPU, cuda), torch.zeros(8)
    cuda.watch("the user's tensor", memory)
    with cuda.stream(cuda.default):
        memory.add_(1)
        lane.await_caller()
    with lane.on(lane.compute):
        memory.clone()
    assert not cuda.races


def test_the_host_may_reuse_what_a_drained_lane_used(cuda: FakeCuda) -> None:
    lane, other, memory = StreamLane(CPU, cuda), StreamLane(CPU, cuda), torch.zeros(8)
    cuda.watch("memory", memory)
    for stream in (lane.compute, lane.comm, lane.copy):
        with lane.on(stream):
            memory.add_(1)
        lane.drain()
    with other.on(other.compute):
        memory.add_(1)
    assert not cuda.races


def test_ranks_of_one_device_have_streams_of_their_own_and_get_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[StreamLane] = []

    def make(device: torch.device) -> StreamLane:
        made.append(StreamLane(device, FakeCuda()))
        return made[-1]

    monkeypatch.setattr(streams, "StreamLane", make)
    monkeypatch.setattr(streams, "_made", {})
    card, other = torch.device("cuda", 0), torch.device("cuda", 1)
    first = open_lanes([card, other, card])
    assert len(made) == 3
    assert [lane.device for lane in first] == [card, other, card]
    assert open_lanes([card, card]) == [first[0], first[2]]
    assert len(made) == 3


@pytest.mark.parametrize(("kind", "is_asked"), [("cuda", True), ("xpu", False)])
def test_a_lane_drives_its_device_by_torchs_module_for_it(
    kind: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    module: Any = FakeCuda()
    monkeypatch.setattr(module, "Event", lambda **choices: asked.append(choices))
    monkeypatch.setattr(streams, "device_module", {torch.device(kind, 0): module}.__getitem__)
    lane = StreamLane(torch.device(kind, 0))
    assert lane.device_module is module
    lane.event(timing=True)
    assert asked == [{"enable_timing": True, **({"blocking": True} if is_asked else {})}]
    # torch's own takes these, and does not take `blocking` where it is not asked for.
    inspect.signature(torch.get_device_module(kind).Event).bind(**asked[0])


def test_pinned_memory_is_the_hosts_whatever_the_users_default_device_is(cuda: FakeCuda) -> None:
    with torch.device("meta"):
        for lane in (StreamLane(CPU, cuda), HostLane(CPU)):
            assert lane.pinned((2,), torch.float32).device == CPU


@pytest.mark.parametrize("awaits", [True, False])
def test_what_a_dataset_makes_on_the_default_stream_is_awaited(cuda: FakeCuda, awaits: bool) -> None:
    lane, memory = StreamLane(CPU, cuda), torch.zeros(8)
    cuda.watch("the dataset's tensor", memory)
    with cuda.stream(cuda.default):
        memory.add_(1)
    with lane.on(lane.copy):
        if awaits:
            lane.await_default(lane.copy, CPU)
        memory.clone()
    assert bool(cuda.races) is not awaits


def test_streams_aside_are_made_once(cuda: FakeCuda) -> None:
    lane = StreamLane(CPU, cuda)
    first, second = lane.aside(0), lane.aside(1)
    assert first.priority == -1
    assert lane.aside(0) is first
    assert len({id(stream) for stream in (first, second, lane.comm, lane.compute, lane.copy)}) == 5
    host = HostLane(CPU)
    assert host.aside(3) is host.comm


def test_two_threads_that_ask_for_a_stream_aside_get_the_same(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, watched, make = StreamLane(CPU, cuda), Watched(), cuda.Stream

    def slow(**options: Any) -> Any:
        watched.await_second()
        return make(**options)

    monkeypatch.setattr(cuda, "Stream", slow)
    lane._asking = watched  # type: ignore[assignment]
    first, second = both(lambda: lane.aside(1))
    assert first is second


def test_lanes_await_each_of_two_callers_at_once(cuda: FakeCuda) -> None:
    lane, watched, log = StreamLane(CPU, cuda), Watched(), []

    class Mark:
        def record(self, stream: Any) -> None:
            log.append(("record", threading.get_ident()))
            watched.await_second()

    def wait(mark: Any) -> None:
        log.append(("wait", threading.get_ident()))

    lane._marks["caller"] = Mark()  # type: ignore[assignment]
    lane._asking = watched  # type: ignore[assignment]
    lane.compute.wait_event = wait  # type: ignore[method-assign]
    both(lane.await_caller)
    assert [what for what, _ in log] == ["record", "wait"] * 2
    assert log[0][1] == log[1][1] != log[2][1]
