"""Tests of the outer step behind a mean: the formula, in every collective, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective import host, outer
from flowdp.collective import mean as mean_module
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import Flat, FlatReplica
from flowdp.device.weight_average import WeightAverage
from flowdp.errors import OptionError
from flowdp.options import OuterOptions
from tests.collective.fake_world import WAYS, FakeWorld, book_on_host, host_mean

SLOWMO = OuterOptions()
DILOCO = OuterOptions(lr=0.7, momentum=0.9, nesterov=True)
EACH = pytest.mark.parametrize("options", [SLOWMO, DILOCO, OuterOptions(lr=1.3, momentum=0.0)])


class Reference:
    """The formula, for one tensor, in float64."""

    def __init__(self, options: OuterOptions, start: Tensor) -> None:
        self.options = options
        self.last = start.double().clone()
        self.momentum = torch.zeros_like(self.last)

    def step(self, mean: Tensor) -> Tensor:
        difference = self.last - mean.double()
        self.momentum = self.options.momentum * self.momentum + difference
        step = self.momentum
        if self.options.nesterov:
            step = difference + self.options.momentum * self.momentum
        self.last = self.last - self.options.lr * step
        return self.last


# ---------------------------------------------------------------- the formula
@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_several_steps_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, options: OuterOptions, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(outer, "NARROW_BLOCK", 7)
    draw = torch.Generator().manual_seed(3)
    memory = torch.randn(50, generator=draw).to(dtype)
    buffers = memory[40:].clone()
    flat = Flat(memory, 40)
    wanted = Reference(options, memory[:40])
    state = OuterMomentum(options, [flat])
    for _ in range(5):
        memory[:40] += 0.1 * torch.randn(40, generator=draw).to(dtype)
        expected = wanted.step(memory[:40])
        state.step([memory])
        wanted.last = expected.to(dtype).double()  # as the replicas hold it
        torch.testing.assert_close(memory[:40], expected.to(dtype))
        torch.testing.assert_close(state.momentum[0].double(), wanted.momentum, rtol=1e-5, atol=1e-6)
    assert state.momentum[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(memory[40:], buffers)


def test_buffers_counts_and_moving_averages_have_no_state() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    replica = FlatReplica(module)
    averaged = WeightAverage(replica, module, 0.9)
    state = OuterMomentum(SLOWMO, averaged.flats)
    assert [len(one) for one in state.momentum] == [len(part) for part in replica.trained()]
    before = [memory.clone() for memory in averaged.memories]
    for memory in averaged.memories:
        memory.add_(1)
    state.step(averaged.memories)
    state.step(averaged.memories)  # no step since: the momentum alone
    for flat, old in zip(averaged.flats, before, strict=True):
        start = flat.split if flat.is_measured else 0
        assert torch.equal(flat.memory[start:], old[start:] + 1)
        assert start == 0 or not torch.equal(flat.memory[:start], old[:start] + 1)


# ---------------------------------------------------------------- in each collective
@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(mean_module, "BLOCK", 256)
    if request.param == "host, all members":
        monkeypatch.setattr(host, "SMALL", 0)
    return str(request.param)


def opened(way: str, options: OuterOptions | None) -> FakeWorld:
    return FakeWorld(partial(equal_start, WAYS[way][0], options), WAYS[way][1])


def equal_start(make: Any, options: OuterOptions | None, world: FakeWorld) -> Any:
    """Make a collective of equal replicas: the first mean moves away from these."""
    for replica in world.replicas[1:]:
        for mine, theirs in zip(replica.memories, world.replicas[0].memories, strict=True):
            mine.copy_(theirs)
    return make(world, options)


def trained(world: FakeWorld, round: int, rank: int) -> None:
    """Steps of a rank: its parameters and buffers change, differently in each round."""
    draw = torch.Generator().manual_seed(100 * round + rank)
    for flat in world.replicas[rank].flats:
        if not flat.counts:
            flat.memory.add_(torch.randn(len(flat.memory), generator=draw).to(flat.memory.dtype), alpha=0.1)


def parameters(world: FakeWorld, rank: int) -> list[Tensor]:
    return [part.clone() for part in world.replicas[rank].trained()]


def weighted(parts: Sequence[Sequence[Tensor]], samples: Sequence[int]) -> list[Tensor]:
    return [
        sum(n * part.double() for n, part in zip(samples, same, strict=True) if n) / sum(samples)
        for same in zip(*parts, strict=True)
    ]


def check(world: FakeWorld, wanted: Sequence[Tensor], ranks: Sequence[int] = (0, 1, 2)) -> None:
    for rank in ranks:
        for own, first, expected in zip(
            world.replicas[rank].trained(), world.replicas[ranks[0]].trained(), wanted, strict=True
        ):
            assert torch.equal(own, first)
            tolerance = 2**-6 if own.dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(own.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [SLOWMO, DILOCO])
def test_all_ranks_take_the_step_of_the_formula(way: str, options: OuterOptions) -> None:
    world, plain = opened(way, options), opened(way, None)
    wanted = [Reference(options, part) for part in parameters(world, 0)]
    for round, samples in enumerate([[5, 3, 9], [1, 1, 1], [8, 0, 24], [0, 7, 0]]):
        for rank in range(3):
            for one in (world, plain):
                trained(one, round, rank)
        means = weighted([parameters(world, rank) for rank in range(3)], samples)
        drift = [one.drift for one in world.read(world.hold(samples, drift=True))]
        check(world, [one.step(mean) for one, mean in zip(wanted, means, strict=True)])
        for one, part in zip(wanted, parameters(world, 0), strict=True):
            one.last = part.double()
        if round == 0:  # the drift is the distance from the mean, and buffers have the plain one
            assert drift == [one.drift for one in plain.read(plain.hold(samples, drift=True))]
            for mine, theirs in zip(world.replicas[0].flats, plain.replicas[0].flats, strict=True):
                assert torch.equal(mine.memory[mine.split :], theirs.memory[theirs.split :])


def test_a_rank_that_has_left_leaves_the_momentum(way: str) -> None:
    """The parts of the ranks are cut anew; the state of each element stays."""
    world = opened(way, SLOWMO)
    wanted = [Reference(SLOWMO, part) for part in parameters(world, 0)]
    for round, ranks in enumerate([(0, 1, 2), (0, 1, 2), (0, 2), (0, 2)]):
        if round == 2:
            world.gate.leave(1)
        for rank in ranks:
            trained(world, round, rank)
        samples = [4, 2, 3]
        means = weighted([parameters(world, rank) for rank in ranks], [samples[rank] for rank in ranks])
        world.read(world.hold(samples, ranks=ranks))
        check(world, [one.step(mean) for one, mean in zip(wanted, means, strict=True)], ranks)
        for one, part in zip(wanted, parameters(world, 0), strict=True):
            one.last = part.double()


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("host")], indirect=True)
def test_what_its_device_finds_bad_takes_the_step_of_the_others(way: str) -> None:
    world = opened(way, SLOWMO)
    wanted = [Reference(SLOWMO, part) for part in parameters(world, 0)]
    for round, bad in enumerate([(), (1,), ()]):
        for rank in range(3):
            trained(world, round, rank)
        samples = [4, 2, 3]
        counted = [0 if rank in bad else count for rank, count in enumerate(samples)]
        means = weighted([parameters(world, rank) for rank in range(3)], counted)
        world.read(world.hold(samples, bad=bad))
        check(world, [one.step(mean) for one, mean in zip(wanted, means, strict=True)])
        for one, part in zip(wanted, parameters(world, 0), strict=True):
            one.last = part.double()
    for one in world.mean.outer:
        for mine, first in zip(one.momentum, world.mean.outer[0].momentum, strict=True):
            assert torch.equal(mine, first)
            assert bool(mine.isfinite().all())


def test_no_race_between_the_step_and_the_rounds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = opened(way, DILOCO)
    if WAYS[way][0] is host_mean:
        book_on_host(monkeypatch, world)
    for rank, one in enumerate(world.mean.outer):
        world.cuda.watch(f"momentum {rank}", *one.momentum, *one._last.values())
    for round in range(12):
        world.hold([3, 1, 2], drift=round % 2 == 0, steps=1)
    assert world.cuda.races == []


# ---------------------------------------------------------------- snapshots
class Async(FakeWorld):
    """Snapshots that a helper averages, and meetings, with one momentum."""

    def __init__(self, way: str, options: OuterOptions) -> None:
        super().__init__(partial(equal_start, WAYS[way][0], options), WAYS[way][1])
        self.snapshots = SnapshotMean(self.replicas, self.lanes, self.mean.outer)

    def average(self, round: int, samples: Sequence[int]) -> list[list[Tensor]]:
        """Average snapshots; ranks 1 and 2 step meanwhile. Returns the change of each rank by that."""
        since = []
        for rank, lane in enumerate(self.lanes):
            with lane.on(lane.compute):
                self.snapshots.take(rank, round)
                before = parameters(self, rank)
                if rank:
                    trained(self, 50 + round, rank)
                after = parameters(self, rank)
            since.append([new.double() - old.double() for new, old in zip(after, before, strict=True)])
        self.snapshots.average(round, samples)
        for rank, lane in enumerate(self.lanes):
            with lane.on(lane.compute):
                self.snapshots.apply(rank, round, int(rank > 0))
        return since


@EACH
@pytest.mark.parametrize("where", ["host, on the CPU", "two cards"])
def test_snapshots_and_meetings_have_one_momentum(where: str, options: OuterOptions) -> None:
    world = Async(where, options)
    wanted = [Reference(options, part) for part in parameters(world, 0)]
    samples = [5, 3, 2]
    for round, kind in enumerate(["average", "average", "meet", "average", "meet"]):
        for rank in range(3):
            trained(world, round, rank)
        means = weighted([parameters(world, rank) for rank in range(3)], samples)
        moved = [one.step(mean) for one, mean in zip(wanted, means, strict=True)]
        if kind == "meet":
            world.read(world.hold(samples))
            check(world, moved)
            continue
        for rank, since in enumerate(world.average(round, samples)):
            for own, new, change in zip(parameters(world, rank), moved, since, strict=True):
                tolerance = 2**-5 if own.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(own.double(), new + change, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("where", ["host, on the CPU", "one card", "two cards"])
def test_ranks_without_a_step_since_have_the_bits_of_the_last_mean(where: str) -> None:
    world = Async(where, DILOCO)
    for round in range(3):
        for rank in range(3):
            trained(world, round, rank)
        world.average(round, [1, 2, 3])
        for own, last in zip(parameters(world, 0), world.mean.outer[0]._last.values(), strict=True):
            assert torch.equal(own, last)
    for one in world.mean.outer[1:]:
        for mine, first in zip(one._last.values(), world.mean.outer[0]._last.values(), strict=True):
            assert torch.equal(mine, first)


@pytest.mark.parametrize("where", ["one card", "two cards", "three cards"])
def test_snapshots_are_moved_without_a_race(where: str) -> None:
    world = Async(where, SLOWMO)
    for round in range(6):
        world.average(round, [1, 2, 3])
        if round == 0:
            for rank, one in enumerate(world.mean.outer):
                world.cuda.watch(f"momentum {rank}", *one.momentum, *one._last.values())
            for card, mean in world.snapshots._mean.items():
                world.cuda.watch(f"mean on {card}", *mean)
    assert world.cuda.races == []


def test_a_momentum_in_the_hosts_memory_is_not_for_snapshots_on_devices() -> None:
    with pytest.raises(OptionError, match="Use policy='cadence'"):
        Async("host, last arrival", SLOWMO)
