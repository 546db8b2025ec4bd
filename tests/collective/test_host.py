"""Tests of the mean in host memory; what all means share is in test_on_streams.py."""

import pytest

from flowdp.collective import base, local
from flowdp.device.streams import QUIET
from flowdp.errors import CollectiveAborted
from flowdp.protocol.messages import Arrival
from tests.collective.fake_world import (
    FakeWorld,
    book_on_host,
    host_mean,
    in_threads,
    without_synchronize,
    without_waits,
)


@pytest.fixture(params=["alone", "together"])
def world(request, monkeypatch) -> FakeWorld:
    monkeypatch.setattr(base, "BLOCK", 256)
    if request.param == "together":
        monkeypatch.setattr(local, "SMALL", 0)
    world = FakeWorld(host_mean, (0, 1, 1))
    book_on_host(monkeypatch, world)
    world.hold([1, 2, 3], steps=1)
    assert world.cuda.races == []
    return world


def test_without_ready_the_copy_down_is_too_early(monkeypatch, world):
    without_waits(monkeypatch, lambda: world.mean._ready)
    world.hold([1, 2, 3], steps=1)
    assert any(race.startswith("rank") for race in world.cuda.races)


def test_without_the_mark_the_host_reads_too_early(monkeypatch, world):
    copies = [copies.down[1] for ring in world.mean._copies for copies in ring]
    without_synchronize(monkeypatch, lambda: copies)
    world.hold([1, 2, 3], steps=1)
    assert any(race.startswith("pinned memory") for race in world.cuda.races)


def test_without_the_other_mark_the_next_step_is_too_early(monkeypatch, world):
    copies = [copies.up[1] for ring in world.mean._copies for copies in ring]
    without_waits(monkeypatch, lambda: copies)
    world.hold([1, 2, 3], steps=1)
    assert any(race.startswith("rank") for race in world.cuda.races)


def test_copies_are_made_once_and_while_nobody_launches(monkeypatch):
    world = FakeWorld(host_mean, (0, -1))
    made = []
    real = world.lanes[0].pinned
    monkeypatch.setattr(world.lanes[0], "pinned", lambda *args: (made.append(QUIET.locked()), real(*args))[1])
    world.hold([1, 2])
    count = len(world.replicas[0].memories)
    assert made == [True] * count
    world.hold([1, 2])
    assert len(made) == count
    # The CPU rank takes part with its own memory.
    own = [memory.data_ptr() for memory in world.replicas[1].memories]
    assert [memory.data_ptr() for memory in world.mean._memories[1]] == own


def test_the_time_is_that_of_both_copies_and_the_mean(world):
    readings = world.hold([1, 2, 3])
    number = world.mean._rounds[1]
    copies = world.mean._copies[1][number % len(world.mean._copies[1])]
    result = world.read(readings)[1]
    copied_ms = sum(start.elapsed_time(end) for start, end in (copies.down, copies.up))
    assert copied_ms > 0.0
    assert result.sync_ms > copied_ms


def test_an_abort_releases_who_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(local, "SMALL", 0)
    world = FakeWorld(host_mean, (0, 1))

    def body(rank: int) -> object:
        lane = world.lanes[rank]
        with lane.on(lane.compute):
            world.mean.prepare(rank)
            outcome = world.gate.enter(Arrival(rank, 0, 0, 1, 1))
            if rank == 0:
                return world.mean.average(rank, outcome)
            world.gate.abort("rank 1 failed")
            world.mean.abort()
            return None

    first, _ = in_threads([0, 1], body)
    assert isinstance(first, CollectiveAborted)
    world.mean.close()
