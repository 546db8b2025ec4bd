"""Tests of the states that machines keep, send and gather."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import pytest

from flowdp.checkpoint.machine_states import DroppedStates, StateCollector, WantedStates
from flowdp.checkpoint.saver import Saver
from flowdp.checkpoint.state_sender import StateSender
from flowdp.errors import CheckpointError, CollectiveError
from flowdp.protocol.commands import Save
from flowdp.protocol.position import Position
from tests.limits import HANG_S


class Road:
    """Stands for the group between machine 0 and one other: a queue."""

    def __init__(self, machines: int = 2) -> None:
        self.others = range(1, machines)
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.fails: list[Exception] = []  # of the next values that are sent
        self.is_lost = False

    def name(self, machine: int) -> str:
        return f"machine {machine}"

    def send(self, value: Any, machine: int) -> None:
        assert machine == 0
        if self.fails:
            raise self.fails.pop(0)
        self.queue.put(value)

    def receive(self, machine: int) -> Any:
        if self.is_lost:
            raise CollectiveError(f"machine {machine} was lost")
        return self.queue.get(timeout=HANG_S)


class Pair:
    """A sender and a collector with a link between them that is as quick as a call."""

    def __init__(self) -> None:
        self.road = Road()
        self.sender = StateSender(cast(Any, self.road))
        self.saver = Saver(self.sender)
        self.collector = StateCollector(cast(Any, self.road), self.sender.take)
        self.saver.start()

    def keep(self, capture: int, *ranks: str, error: Exception | None = None) -> None:
        def read(name: str) -> dict[str, Any]:
            if error is not None:
                raise error
            return {"name": name}

        for rank, name in enumerate(ranks):
            self.saver.put(1 + rank, partial(read, name))
        self.saver.save(Save(capture, Position(2, capture), version=capture, snapshots=0), [])

    def collect(self, capture: int) -> list[Any]:
        return [state["name"] for state in self.collector.collect(capture)]


@pytest.fixture
def pair() -> Any:
    one = Pair()
    yield one
    one.sender.lose()
    assert one.sender.close(HANG_S)


def test_the_states_of_a_capture_come_when_they_are_asked_for(pair: Pair) -> None:
    pair.keep(0, "a0", "b0")
    pair.keep(3, "a3", "b3")
    assert pair.sender.is_busy
    assert pair.collect(0) == ["a0", "b0"]
    assert pair.collect(3) == ["a3", "b3"]
    assert pair.sender.close(HANG_S)
    assert not pair.sender.is_busy


def test_the_order_to_keep_them_may_come_behind_the_wish(pair: Pair) -> None:
    found: list[Any] = []
    asked = threading.Event()

    def tell(message: Any) -> None:
        pair.sender.take(message)
        asked.set()

    pair.collector = StateCollector(cast(Any, pair.road), tell)
    asks = threading.Thread(target=lambda: found.append(pair.collect(1)))
    asks.start()
    assert asked.wait(HANG_S)
    pair.keep(1, "a1")
    asks.join(HANG_S)
    assert found == [["a1"]]


def test_dropped_states_are_let_go_before_and_after_they_are_kept(pair: Pair) -> None:
    pair.keep(0, "a0")
    pair.collector.drop([0, 1])
    pair.collector.drop([])
    pair.keep(1, "a1")
    assert not pair.sender.is_busy
    pair.keep(2, "a2")
    assert pair.collect(2) == ["a2"]


def test_the_end_waits_for_a_capture_that_may_be_asked_for(pair: Pair) -> None:
    pair.keep(4, "a4")
    assert not pair.sender.close(timeout_s=0.01)
    assert pair.collect(4) == ["a4"]
    assert pair.sender.close(HANG_S)


def test_a_machine_0_that_is_gone_frees_the_sender(pair: Pair) -> None:
    pair.keep(4, "a4")
    pair.sender.lose()
    pair.keep(5, "a5")
    assert not pair.sender.is_busy
    assert pair.sender.close(HANG_S)


def test_an_error_there_is_an_error_here_and_the_next_one_is_collected(pair: Pair) -> None:
    pair.keep(0, "a0", error=MemoryError("no room"))
    pair.keep(1, "a1")
    pair.keep(2, "a2")
    with pytest.raises(CheckpointError, match="machine 1: MemoryError: no room"):
        pair.collect(0)
    pair.road.fails = [TypeError("cannot pickle")]
    with pytest.raises(CheckpointError, match="machine 1: TypeError: cannot pickle"):
        pair.collect(1)
    assert pair.collect(2) == ["a2"]


def test_a_lost_machine_is_a_passing_error() -> None:
    """The run ends by the lost machine, not by the file."""
    road = Road(machines=3)
    road.is_lost = True
    told: list[Any] = []
    collector = StateCollector(cast(Any, road), told.append)
    with pytest.raises(CheckpointError, match="machine 1 was lost") as caught:
        collector.collect(2)
    assert isinstance(caught.value.__cause__, CollectiveError)
    collector.drop([3])
    assert told == [WantedStates(2), DroppedStates((3,))]


def test_a_sender_whose_machine_0_is_lost_ends(pair: Pair) -> None:
    pair.keep(0, "a0")
    pair.keep(1, "a1")
    pair.road.fails = [CollectiveError("machine 0 was lost")]
    pair.sender.take(WantedStates(0))
    assert pair.sender.thread is not None
    pair.sender.thread.join(HANG_S)
    assert not pair.sender.thread.is_alive()
    assert not pair.sender.is_busy
