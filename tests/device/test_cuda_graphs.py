"""Tests of graphs on fake streams: recorded operations, invalid captures, and leftovers of failed ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.device.cuda_graphs import GraphPool
from flowdp.device.streams import QUIET, StreamLane
from tests.fakes import FakeCuda, FakeEvent
from tests.limits import HANG_S

CPU = torch.device("cpu")


class Bench:
    """A fake card with one rank, and its pool."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.lane = StreamLane(CPU, self.cuda)
        self.pool = GraphPool(self.lane)
        self.memory = torch.zeros(4)

    def add_one(self) -> None:
        self.memory.add_(torch.ones(4))

    @property
    def is_clean(self) -> bool:
        captures = self.cuda.captures
        return not (captures.current or captures.diverted or captures.pools or QUIET.locked())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def elsewhere(work: Callable[[], Any]) -> list[Any]:
    """Run a function in another thread; returns its result or error."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(work())
        except RuntimeError as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(HANG_S)
    return answers


def test_work_is_recorded_and_runs_at_each_replay(bench: Bench) -> None:
    with bench.lane.on(bench.lane.compute):
        graph = bench.pool.capture(bench.add_one)
        assert bench.memory.tolist() == [0, 0, 0, 0]
        graph.replay()
        graph.replay()
    assert bench.memory.tolist() == [2, 2, 2, 2]
    assert bench.cuda.races == []


def test_results_stay_where_they_are(bench: Bench) -> None:
    made: list[Tensor] = []
    with bench.lane.on(bench.lane.compute):
        graph = bench.pool.capture(lambda: made.append(bench.memory * 2))
        assert made[0].isnan().all()
        bench.memory.fill_(3)
        graph.replay()
    assert made[0].tolist() == [6, 6, 6, 6]


def test_what_surrounds_a_capture_is_ordered_with_the_replays(bench: Bench) -> None:
    with bench.lane.on(bench.lane.compute):
        bench.pool.capture(bench.add_one).replay()
        bench.pool.capture(bench.add_one).replay()
    assert bench.cuda.races == []


@pytest.mark.parametrize("number", [0, 1], ids=["before", "behind"])
def test_each_edge_around_a_capture_is_needed(
    bench: Bench, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = (bench.pool._before, bench.pool._behind)[number]
    own = FakeEvent.wait
    monkeypatch.setattr(FakeEvent, "wait", lambda event, stream: event is deaf or own(event, stream))
    with bench.lane.on(bench.lane.compute):
        bench.pool.capture(bench.add_one).replay()
        bench.pool.capture(bench.add_one).replay()
    assert bench.cuda.races


def test_nothing_is_allocated_or_launched_together_beside_a_capture(bench: Bench) -> None:
    seen: list[bool] = []
    with bench.lane.on(bench.lane.compute):
        bench.pool.capture(lambda: seen.append(QUIET.locked()))
    assert seen == [True]
    assert not QUIET.locked()


def test_other_threads_may_ask_wait_and_mark_meanwhile(bench: Bench) -> None:
    lane, mark = bench.lane, bench.lane.event()

    def beside() -> bool:
        mark.record(lane.compute)  # as the allocator does for memory that a batch has left
        lane.copy.wait_event(mark)
        mark.synchronize()
        return mark.query()

    def work() -> None:
        bench.add_one()
        assert elsewhere(beside) == [True]

    with lane.on(lane.compute):
        bench.pool.capture(work).replay()
    assert bench.memory.tolist() == [1, 1, 1, 1]


def outside(bench: Bench) -> None:
    mark = bench.lane.event()
    mark.record(bench.lane.copy)
    bench.cuda.current_stream().wait_event(mark)


def fork(bench: Bench) -> None:
    mark = bench.lane.event()
    mark.record()
    bench.lane.copy.wait_event(mark)


SPOILS: dict[str, tuple[str, Callable[[Bench], Any]]] = {
    "a value on the host": ("not permitted", lambda bench: bench.memory.sum().item()),
    "a tensor of the host": ("not permitted", lambda b: b.memory.copy_(b.cuda.captures.host(torch.ones(4)))),
    "a wait for a stream": ("not permitted", lambda bench: bench.lane.copy.synchronize()),
    "a question": ("not permitted", lambda bench: bench.lane.event().query()),
    "an event from outside": ("uncaptured work", outside),
    "a stream that does not come back": ("unjoined", fork),
    "an error of the user": ("division", lambda _: 1 / 0),
}


@pytest.mark.parametrize(("message", "spoil"), SPOILS.values(), ids=SPOILS)
def test_a_failed_capture_leaves_nothing(bench: Bench, message: str, spoil: Callable[[Bench], Any]) -> None:
    with bench.lane.on(bench.lane.compute):
        with pytest.raises((RuntimeError, ZeroDivisionError), match=message):
            bench.pool.capture(lambda: (bench.add_one(), spoil(bench)))  # type: ignore[arg-type, return-value]
        assert bench.cuda.current_stream() is bench.lane.compute
        assert bench.is_clean
        bench.add_one()  # the stream works
        bench.pool.capture(bench.add_one).replay()
    assert bench.memory.tolist() == [2, 2, 2, 2]


def test_a_torch_that_takes_the_allocator_back_itself_is_left_alone(bench: Bench) -> None:
    own = bench.cuda.CUDAGraph

    def tidy() -> Any:
        graph = own()
        end = graph.capture_end

        def capture_end() -> None:
            try:
                end()
            except RuntimeError:
                bench.cuda.captures.diverted.clear()
                bench.cuda.captures.pools.clear()
                raise

        graph.capture_end = capture_end  # type: ignore[method-assign]
        return graph

    bench.cuda.CUDAGraph = tidy  # type: ignore[method-assign]
    with bench.lane.on(bench.lane.compute), pytest.raises(RuntimeError, match="not permitted"):
        bench.pool.capture(lambda: bench.memory.sum().item())  # type: ignore[arg-type, return-value]
    assert bench.is_clean


def test_graphs_share_a_pool_that_goes_with_them(bench: Bench) -> None:
    with bench.lane.on(bench.lane.compute):
        for _ in range(2):
            bench.pool.capture(bench.add_one)
    assert list(bench.cuda.captures.pools.values()) == [2]
    bench.pool.clear()
    assert bench.is_clean
