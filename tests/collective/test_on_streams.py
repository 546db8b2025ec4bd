"""Tests of all collectives on streams: the same mean, no race, and every edge needed."""

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flowdp.collective import host
from flowdp.collective import mean as mean_module
from flowdp.collective.base import NOTHING
from flowdp.collective.nccl import NcclMean
from flowdp.collective.on_streams import ROUNDS
from flowdp.device.weight_average import WeightAverage
from flowdp.errors import OptionError
from tests.collective.fake_world import (
    WAYS,
    FakeWorld,
    book_on_host,
    device_mean,
    host_mean,
)
from tests.limits import HANG_S
from tests.threads.test_gate import waits_in


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks so short that a flat has several, the last one shorter."""
    monkeypatch.setattr(mean_module, "BLOCK", 256)


@pytest.fixture(params=WAYS)
def world(request, monkeypatch) -> FakeWorld:
    make, cards = WAYS[request.param]
    if request.param == "host, all members":
        monkeypatch.setattr(host, "SMALL", 0)
    world = FakeWorld(make, cards)
    world.way = WAYS[request.param]
    if make is host_mean:
        book_on_host(monkeypatch, world)
    return world


def weighted(states: Sequence[dict[str, Tensor]], samples: Sequence[int]) -> dict[str, Tensor]:
    """The expected values of every replica, in float64."""
    wanted = {}
    for name, tensor in states[0].items():
        if tensor.dtype.is_floating_point:
            terms = [n * state[name].double() for n, state in zip(samples, states, strict=True) if n]
            wanted[name] = torch.stack(terms).sum(0) / sum(samples)
        else:
            wanted[name] = torch.stack([state[name] for state in states]).amax(0)
    return wanted


def test_moving_averages_are_averaged_and_the_drift_is_that_of_the_parameters(world):
    drifts = [one.drift for one in world.read(world.hold([1, 2, 5], drift=True))]
    averages: list[WeightAverage] = []

    def make(new: FakeWorld):
        for rank, (replica, module) in enumerate(zip(new.replicas, new.modules, strict=True)):
            averages.append(WeightAverage(replica, module, 0.9))
            for memory in averages[-1].averages:
                memory.fill_(float(rank + 1))
        new.replicas = averages
        return world.way[0](new)

    also = FakeWorld(make, world.way[1])
    assert drifts == [one.drift for one in also.read(also.hold([1, 2, 5], drift=True))]
    for average in averages:
        for memory in average.averages:
            assert torch.equal(memory, torch.full_like(memory, (1 + 2 * 2 + 5 * 3) / 8))


MASKING = [way for way in WAYS if not way.startswith("host")]


@pytest.mark.parametrize("world", MASKING, indirect=True)
@pytest.mark.parametrize(
    ("samples", "bad", "drift"),
    [
        ([8, 8, 8], (0,), True),
        ([320, 192, 64], (), True),
        ([320, 192, 64], (2,), True),
        ([320, 192, 64], (0, 1), False),
        ([5, 0, 9], (1, 2), True),
    ],
)
def test_what_its_device_finds_bad_weighs_nothing(world, samples, bad, drift):
    """As if the host had known it at the gate: equal for all ranks, with the same bits."""
    known = FakeWorld(*WAYS[next(way for way in MASKING if WAYS[way] == world.way)])
    counted = [0 if rank in bad else count for rank, count in enumerate(samples)]
    results = world.read(world.hold(samples, drift=drift, bad=bad))
    wanted = known.read(known.hold(counted, drift=drift))
    after = world.states()
    for name, tensor in known.states()[0].items():
        if samples[0] == samples[1] or tensor.dtype != torch.bfloat16:
            torch.testing.assert_close(after[0][name], tensor, equal_nan=True)
        assert all(torch.equal(state[name], after[0][name]) for state in after), name
    if sum(map(bool, counted)) > 1:
        for rank, count in enumerate(counted):
            if drift and count:
                assert results[rank].drift == pytest.approx(wanted[rank].drift, rel=1e-3)
                assert results[rank].norm == pytest.approx(wanted[rank].norm, rel=1e-5)
    assert world.cuda.races == []


@pytest.mark.parametrize("world", MASKING, indirect=True)
@pytest.mark.parametrize("samples", [[1, 2, 3], [0, 4, 0]])
def test_the_mean_of_none_is_none(world, samples):
    """Lost values must not look like valid ones."""
    world.read(world.hold(samples, drift=True, bad=(0, 1, 2)))
    for replica in world.replicas:
        assert all(bool(part.isnan().all()) for part in replica.trained())


@pytest.mark.parametrize(
    ("samples", "drift"), [([320, 192, 64], False), ([5, 3, 9], True), ([8, 0, 24], True), ([0, 7, 0], True)]
)
def test_all_ways_agree_with_float64_and_their_replicas_to_the_bit(world, samples, drift):
    before = world.states()
    wanted = weighted(before, samples)
    results = world.read(world.hold(samples, drift=drift))
    after = world.states()
    for name, tensor in wanted.items():
        found = after[0][name].double()
        # Size of the terms, which may cancel.
        size = weighted([{name: state[name].double().abs()} for state in before], samples)[name]
        tolerance = 2**-8 if after[0][name].dtype == torch.bfloat16 else 1e-6
        is_same = (found == tensor) | ((found - tensor.double()).abs() <= tolerance * size)
        assert bool(is_same.all()), name
        assert all(torch.equal(state[name], after[0][name]) for state in after), name
    assert all(result.sync_ms > 0.0 for result in results)
    several = sum(map(bool, samples)) > 1  # with only one giving rank, the mean is its values
    gave = [drift and several and count > 0 for count in samples]
    assert [result.drift is not None for result in results] == gave
    assert world.cuda.races == []


def test_a_replica_that_is_not_a_number_and_gives_nothing_is_healed(world):
    before = world.states()
    for memory in world.replicas[1].memories:
        if memory.dtype.is_floating_point:
            memory.fill_(torch.nan)
    first, bad, last = world.read(world.hold([3, 0, 2], drift=True))
    after = world.states()
    for name, wanted in weighted(before, [3, 0, 2]).items():
        assert torch.allclose(after[1][name].double(), wanted.double(), rtol=2**-8, atol=1e-3), name
        assert all(torch.equal(state[name], after[1][name]) for state in after), name
    assert bad.drift is None  # a value that is not finite would halve the anchor
    assert 0.1 < first.drift < 10
    assert 0.1 < last.drift < 10


def test_drift(world):
    samples = [320, 192, 64]
    vectors = [
        torch.cat([p.detach().double().flatten() for p in module.parameters()]) for module in world.modules
    ]
    mean = sum(n * v for n, v in zip(samples, vectors, strict=True)) / sum(samples)
    distances = [float((v - mean).norm() / mean.norm()) for v in vectors]
    drifts = [result.drift for result in world.read(world.hold(samples, drift=True))]
    if isinstance(world.mean, NcclMean):
        squares = sum(n * d**2 for n, d in zip(samples, distances, strict=True)) / sum(samples)
        assert drifts == pytest.approx([squares**0.5] * 3, rel=1e-4)
    else:
        assert drifts == pytest.approx(distances, rel=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_no_race_in_random_rounds_that_are_read_late(world, seed):
    draw = random.Random(seed)
    unread = []
    for _ in range(3 * ROUNDS):
        samples = [draw.choice([0, 5, 64]) for _ in world.lanes]
        unread += [world.hold(samples, drift=draw.random() < 0.5, steps=draw.randrange(3))]
        while len(unread) > draw.randrange(1, ROUNDS):
            world.read(unread.pop(0))
    assert world.cuda.races == []


def test_what_a_module_moved_takes_part(world):
    before = world.states()
    moved = torch.full((30, 40), 4.0)
    world.modules[0][0].weight.data = moved
    world.cuda.watch("what the module moved", moved)
    world.read(world.hold([1, 1, 2], steps=0))
    wanted = (4.0 + before[1]["0.weight"].double() + 2 * before[2]["0.weight"].double()) / 4
    assert torch.allclose(moved.double(), wanted, atol=1e-6)
    assert torch.equal(moved, world.modules[2][0].weight)
    assert world.cuda.races == []


def test_a_round_without_samples_changes_nothing(world):
    before = world.states()
    assert world.read(world.hold([0, 0, 0], drift=True)) == [NOTHING] * 3
    for state, old in zip(world.states(), before, strict=True):
        assert all(torch.equal(state[name], old[name]) for name in old)


@pytest.mark.parametrize("left", [0, 2])
def test_a_rank_that_left_is_left_out(world, left):
    stayed = [rank for rank in range(3) if rank != left]
    world.hold([1, 1, 1])
    for rank, replica in enumerate(world.replicas):
        for memory in replica.memories:
            memory.add_(rank) if memory.dtype != torch.bool else memory.logical_not_()
    world.replicas[left].memories[0].fill_(torch.nan)
    before = world.states()
    wanted = weighted([before[rank] for rank in stayed], [1, 3])
    samples = [9, 9, 9]
    samples[stayed[0]], samples[stayed[1]] = 1, 3
    world.gate.leave(left)
    light, heavy = world.read(world.hold(samples, ranks=stayed, drift=True))
    after = world.states()
    for name, tensor in wanted.items():
        for rank in stayed:
            assert torch.allclose(after[rank][name].double(), tensor.double(), rtol=2**-8, atol=1e-6), name
        assert after[left][name].equal(before[left][name]) or before[left][name].isnan().any()
    ratio = 1 if isinstance(world.mean, NcclMean) else 3
    assert light.drift == pytest.approx(ratio * heavy.drift, rel=1e-3)
    world.read(world.hold(samples, ranks=stayed, steps=2))
    world.gate.leave(stayed[0])
    before = world.states()
    assert world.read(world.hold(samples, ranks=stayed[1:], drift=True)) == [NOTHING]
    assert all(
        torch.equal(tensor, before[stayed[1]][name]) for name, tensor in world.states()[stayed[1]].items()
    )
    assert world.cuda.races == []


def test_a_leave_that_makes_the_round_launches_from_any_thread(world, monkeypatch):
    """The coordinator's thread has no lane: its current stream must get no work."""
    world.hold([1, 1, 1])
    seen = []
    real_access, real_launch = world.cuda.access, world.mean.launch

    def access(stream, *rest):
        assert stream is not world.cuda.default
        real_access(stream, *rest)

    def launch(outcome):
        seen.append((threading.current_thread(), outcome.members, outcome.left))
        real_launch(outcome)

    monkeypatch.setattr(world.cuda, "access", access)
    monkeypatch.setattr(world.mean, "launch", launch)
    before = world.states()
    waiting = threading.Thread(target=lambda: world.read(world.hold([2, 0, 5], ranks=[0, 2])))
    waiting.start()
    waits_in(world.gate, 2)
    world.gate.leave(1)
    waiting.join(HANG_S)
    assert seen == [(threading.current_thread(), (0, 2), (1,))]
    wanted = weighted([before[0], before[2]], [2, 5])
    after = world.states()
    for rank in (0, 2):
        for name, tensor in wanted.items():
            assert torch.allclose(after[rank][name].double(), tensor.double(), rtol=2**-8, atol=1e-6), name
    assert world.cuda.races == []


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("host")])
def test_a_close_waits_for_every_device_also_where_one_is_dead(way, monkeypatch):
    world, drained = FakeWorld(*WAYS[way]), []

    def drain(lane):
        drained.append(lane)
        if lane is lanes[0]:
            raise RuntimeError("CUDA error: device-side assert")

    lanes = world.mean._lanes
    monkeypatch.setattr(type(lanes[0]), "drain", drain)
    with pytest.raises(RuntimeError, match="device-side assert"):
        world.mean.close()
    assert {*map(id, drained)} == {*map(id, lanes)}


def test_a_reading_may_be_as_late_as_marks_are_kept(world):
    first = world.hold([1, 2, 3], drift=True)
    for _ in range(ROUNDS - 1):
        last = world.hold([1, 2, 3], drift=True)
    world.read(last)
    assert all(result.drift is not None for result in world.read(first))


def test_the_sum_of_squares_of_an_early_round_is_not_a_later_rounds(world):
    first = world.hold([1, 1, 1], drift=True)
    second = world.hold([1, 1, 1], drift=True)
    assert all(result.drift < 1e-3 for result in world.read(second))  # they were equal already
    assert all(result.drift > 0.1 for result in world.read(first))


def test_a_row_is_read_only_when_it_has_arrived(monkeypatch):
    world = FakeWorld(device_mean, (0, 0, 0))
    readings = world.hold([1, 2, 3], drift=True)
    waited = []
    for event in world.mean._latest.arrived:
        monkeypatch.setattr(event, "synchronize", lambda: waited.append(True))
    world.read(readings[:1])
    assert waited == [True]


# ---------------------------------------------------------------- the rest
def test_local_and_streamed_means_give_the_same_bits():
    plain, streamed = FakeWorld(host_mean, (-1, -1, -1)), FakeWorld(device_mean, (0, 0, 0))
    for drift in (False, True):
        for world in (plain, streamed):
            world.hold([5, 0, 9], drift=drift, steps=1)
        for one, other in zip(plain.states(), streamed.states(), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", ["two cards", "nccl"])
def test_a_rank_on_the_cpu_is_refused(way):
    with pytest.raises(OptionError, match=r"rank 1 trains on cpu.*backend='cpu'"):
        FakeWorld(WAYS[way][0], (0, -1, 1))


def test_closing_waits_for_the_last_round(world):
    world.hold([1, 2, 3])
    world.mean.close()
    world.mean.close()
    world.mean.abort()
