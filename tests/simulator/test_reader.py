"""The reader on virtual time: in order, no further ahead than it may, and it says where epochs end."""

from __future__ import annotations

import random

from flowdp.machine.config import CoordinatorConfig
from flowdp.protocol.messages import DataEnded
from flowdp.protocol.position import Position
from flowdp.sim.clock import Clock
from tests.simulator.faults import Scenario
from tests.simulator.reader import VirtualReader


class Readings:
    """A reader of epochs of 3, 1, 3, ... batches, 10 ms each, and what it said."""

    def __init__(self, ahead: int, epochs: int | None = 2, start: Position | None = None) -> None:
        config = CoordinatorConfig(world_size=2, batches=None, epochs=epochs, start=start)
        scenario = Scenario(
            seed=0, config=config, ms_per_step=(1.0, 1.0), lengths=(3, 1), read_ms=10.0, ahead=ahead
        )
        self.clock = Clock(random.Random(0), 0.0)
        self.said: list[tuple[float, object]] = []
        self.reader = VirtualReader(
            scenario,
            self.clock,
            lambda rank, key: self.said.append((self.clock.now_ms, (rank, key))),
            lambda end: self.said.append((self.clock.now_ms, end)),
        )

    def rest(self) -> None:
        while self.clock.advance():
            pass


def test_it_reads_to_the_end_and_says_where_that_was() -> None:
    run = Readings(ahead=10)
    run.reader.start()
    run.rest()
    assert run.said == [(40.0, DataEnded(0, 3, read=3)), (60.0, DataEnded(1, 1, read=1))]
    assert [run.reader.take(0, key) for key in ((0, 0), (0, 2), (1, 0), (0, 1))] == [None] * 4
    assert run.reader.take(0, (0, 0)) == (0, 0)


def test_it_stands_still_with_enough_ahead_and_goes_on_when_one_is_taken() -> None:
    run = Readings(ahead=2)
    run.reader.start()
    run.rest()
    assert run.clock.now_ms == 20.0
    assert run.reader.take(1, (0, 0)) is None
    run.rest()
    assert run.clock.now_ms == 30.0


def test_a_step_takes_all_of_its_batches_or_none() -> None:
    run = Readings(ahead=2)
    run.reader.start()
    run.rest()
    assert run.reader.take(1, (0, 0), (0, 2)) == (0, 2)
    run.rest()
    assert run.said == [(30.0, (1, (0, 2)))]
    assert run.reader.take(1, (0, 0), (0, 2)) is None
    assert run.reader.take(0, (0, 0)) == (0, 0)


def test_who_waits_is_woken_though_much_lies_here() -> None:
    run = Readings(ahead=1)
    assert run.reader.take(1, (0, 2)) == (0, 2)
    run.rest()
    assert run.said == [(30.0, (1, (0, 2)))]


def test_who_waits_beyond_the_end_does_not_drive_the_reader() -> None:
    run = Readings(ahead=1, epochs=None)
    assert run.reader.take(1, (0, 7)) == (0, 7)
    run.rest()
    assert run.said == [(40.0, DataEnded(0, 3, read=3))]
    assert run.reader.take(1, (0, 8)) == (0, 8)
    run.rest()
    assert run.clock.now_ms == 40.0


def test_it_begins_where_the_run_does() -> None:
    run = Readings(ahead=10, start=Position(2, done=1))
    run.reader.start()
    run.rest()
    assert run.said == [(20.0, DataEnded(1, 1, read=1))]


def test_what_a_lost_rank_took_can_be_taken_again() -> None:
    run = Readings(ahead=10)
    run.reader.start()
    run.rest()
    assert run.reader.take(1, (0, 0)) is None
    run.reader.settle(1)
    assert [run.reader.take(rank, key) for rank, key in ((1, (0, 1)), (0, (0, 2)))] == [None] * 2
    run.reader.reclaim(1)
    assert [run.reader.take(0, (0, batch)) for batch in range(3)] == [(0, 0), None, (0, 2)]
