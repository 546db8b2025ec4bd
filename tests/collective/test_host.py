"""Tests of the mean in host memory; what all means share is in test_on_streams.py."""

import threading
from collections.abc import Callable, Sequence
from time import perf_counter

import pytest
import torch
from torch import nn

from flowdp.collective import base, memory_mean
from flowdp.collective.base import Averaging
from flowdp.collective.host import HostMean
from flowdp.collective.memory_mean import MemoryMean
from flowdp.device.flat_gradients import SharedGradients
from flowdp.device.flat_parameters import Flat, FlatReplica
from flowdp.device.streams import QUIET, Lane, open_lanes
from flowdp.errors import CollectiveAborted, OptionError
from flowdp.protocol.messages import Arrival, Outcome
from flowdp.threads.gate import Gate
from tests.collective.fake_world import (
    FakeWorld,
    book_on_host,
    host_mean,
    in_threads,
)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 50), nn.Linear(50, 3)
    )
    module[4].to(torch.bfloat16)
    module[1].running_var.uniform_(0.5, 2.0)
    module[1].num_batches_tracked.fill_(seed)
    return module


@pytest.fixture(params=["alone", "together"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to reduce: by the last arrival, as for small models, and by all members."""
    if request.param == "together":
        monkeypatch.setattr(memory_mean, "SMALL", 0)
    return request.param


def on_cpu(ranks: int) -> list[Lane]:
    return open_lanes([torch.device("cpu")] * ranks)


class World:
    """Replicas, a real gate, and threads that run a round."""

    def __init__(self, world_size: int, build: Callable[[int], nn.Module] = model) -> None:
        self.modules = [build(rank) for rank in range(world_size)]
        self.replicas = [FlatReplica(module, rank) for rank, module in enumerate(self.modules)]
        self.mean = HostMean(self.replicas, on_cpu(world_size), lambda rank: self.gate.finish(rank))
        self.gate = Gate(world_size, self.mean.launch)
        self.round = 0
        self.step = 0

    def hold(self, samples: Sequence[int], *, ranks: Sequence[int] | None = None, drift: bool = False):
        ranks = range(len(self.modules)) if ranks is None else ranks

        def body(rank: int) -> Averaging:
            self.mean.prepare(rank)
            arrival = Arrival(rank, self.round, self.step, steps=1, samples=samples[rank], drift=drift)
            return self.mean.average(rank, self.gate.enter(arrival))()

        results = in_threads(ranks, body)
        self.round += 1
        self.step += len(ranks)
        return results

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [{k: v.clone() for k, v in module.state_dict().items()} for module in self.modules]


def weighted(states: Sequence[dict[str, torch.Tensor]], samples: Sequence[int]) -> dict[str, torch.Tensor]:
    """The expected values of every replica, in float64."""
    wanted = {}
    for name, tensor in states[0].items():
        if tensor.dtype.is_floating_point:
            terms = [n * state[name].double() for n, state in zip(samples, states, strict=True) if n]
            wanted[name] = sum(terms) / sum(samples)
        else:
            wanted[name] = torch.stack([state[name] for state in states]).amax(0)
    return wanted


@pytest.mark.parametrize("samples", [[320, 192], [1, 0], [64, 64, 17], [8, 0, 24, 3]])
@pytest.mark.parametrize("drift", [False, True])
def test_every_member_gets_the_weighted_mean_to_the_same_bits(samples, drift):
    world = World(len(samples))
    wanted = weighted(world.states(), samples)
    results = world.hold(samples, drift=drift)
    assert all(isinstance(result, Averaging) for result in results), results
    after = world.states()
    for name, tensor in wanted.items():
        tolerance = 2**-8 if after[0][name].dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(after[0][name].double(), tensor.double(), rtol=tolerance, atol=1e-7), name
        assert all(torch.equal(state[name], after[0][name]) for state in after), name


def test_bits_do_not_depend_on_who_is_faster(monkeypatch):
    monkeypatch.setattr(base, "BLOCK", 256)
    seen = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]) * 3:
        world = World(3)
        world.hold([5, 3, 9], ranks=order, drift=True)
        seen.append(torch.cat([memory.double() for memory in world.replicas[0].memories]))
    assert all(torch.equal(memory, seen[0]) for memory in seen)


@pytest.mark.parametrize("samples", [[320, 192], [64, 64, 17]])
def test_drift_is_the_distance_from_the_mean_over_parameters(samples):
    world = World(len(samples))
    before = [
        nn.utils.parameters_to_vector([p.detach().double() for p in m.parameters()]) for m in world.modules
    ]
    mean = sum(n * vector for n, vector in zip(samples, before, strict=True)) / sum(samples)
    results = world.hold(samples, drift=True)
    for result, vector in zip(results, before, strict=True):
        assert result.drift == pytest.approx(float((vector - mean).norm() / mean.norm()), rel=1e-3)
    assert all(result.drift is None for result in world.hold(samples))


def test_drift_of_a_diverged_replica_is_not_a_number():
    world = World(2, lambda seed: nn.Linear(3, 3))
    world.modules[1].weight.data[0, 0] = float("nan")
    results = world.hold([1, 1], drift=True)
    assert all(result.drift != result.drift for result in results)


def test_a_replica_that_is_not_a_number_and_gives_nothing_is_healed():
    world = World(3)
    before = world.states()
    for memory in world.replicas[0].memories:
        if memory.dtype.is_floating_point:
            memory.fill_(torch.nan)
    bad, *sound = world.hold([0, 4, 1], drift=True)
    after = world.states()
    for name, wanted in weighted(before, [0, 4, 1]).items():
        assert torch.allclose(after[0][name].double(), wanted.double(), rtol=2**-8, atol=1e-6), name
        assert all(torch.equal(state[name], after[0][name]) for state in after), name
    assert bad.drift is None
    assert all(0.1 < result.drift < 10 for result in sound)


def test_gradients_that_are_not_numbers_and_give_nothing_are_left_out():
    """Their weight and the buffers are left out as well."""
    world = World(3)
    world.mean = HostMean(
        [SharedGradients(flat, module) for flat, module in zip(world.replicas, world.modules, strict=True)],
        on_cpu(len(world.modules)),
        lambda rank: world.gate.finish(rank),
    )
    world.gate = Gate(3, world.mean.launch)
    gradients = world.mean._replicas
    for rank, (module, own) in enumerate(zip(world.modules, gradients, strict=True)):
        value = torch.nan if rank == 1 else 2.0 * rank + 1
        for parameter in module.parameters():
            parameter.grad.fill_(value)
        own.weight.fill_(value)
        own.is_weighted = True
        module[1].running_mean.fill_(value)
    assert all(isinstance(result, Averaging) for result in world.hold([3, 0, 1]))
    for module, own in zip(world.modules, gradients, strict=True):
        assert all(bool((parameter.grad == 2.0).all()) for parameter in module.parameters())
        assert own.weight == 2.0
        assert bool((module[1].running_mean == 2.0).all())


def test_drift_from_a_mean_of_zero_is_zero():
    world = World(2, lambda seed: nn.Linear(3, 3))
    for module, value in zip(world.modules, (1.0, -1.0), strict=True):
        for parameter in module.parameters():
            parameter.data.fill_(value)
    assert [result.drift for result in world.hold([1, 1], drift=True)] == [0.0, 0.0]


def test_rounds_follow_one_another_and_ranks_that_left_are_left_out():
    world = World(3)
    world.hold([1, 1, 1])
    world.modules[0][3].weight.data.add_(1.0)
    world.modules[1][3].weight.data.fill_(5.0)
    world.gate.leave(1)
    before = world.states()
    results = world.hold([1, 9, 3], ranks=[0, 2], drift=True)
    wanted = weighted([before[0], before[2]], [1, 3])
    after = world.states()
    for rank in (0, 2):
        assert torch.allclose(after[rank]["3.weight"].double(), wanted["3.weight"], rtol=1e-6, atol=1e-7)
    assert torch.equal(after[1]["3.weight"], before[1]["3.weight"])
    assert results[0].drift == pytest.approx(3 * results[1].drift, rel=1e-3)


def test_what_a_module_moved_takes_part():
    world = World(2)
    before = world.states()
    moved = torch.full((50, 32), 4.0)
    world.modules[0][3].weight.data = moved
    world.modules[1][1].running_mean = torch.full((8,), 2.0)
    world.hold([1, 1])
    assert torch.allclose(moved, (4.0 + before[1]["3.weight"]) / 2)
    assert torch.equal(moved, world.modules[1][3].weight)
    assert torch.equal(world.modules[1][1].running_mean, (2.0 + before[0]["1.running_mean"]) / 2)


def test_a_member_that_waits_is_released_by_an_abort(way):
    if way == "alone":
        pytest.skip("there is no second meeting to wait in")
    world = World(2)
    entered = threading.Barrier(2)

    def body(rank: int) -> Averaging | None:
        outcome = world.gate.enter(Arrival(rank, 0, 0, steps=1, samples=1))
        entered.wait(60)
        if rank == 0:
            return world.mean.average(rank, outcome)()
        world.gate.abort("rank 1 failed")
        return None

    first, _ = in_threads([0, 1], body)
    assert isinstance(first, CollectiveAborted)
    assert "rank 1 failed" in str(first)


def test_waiting_is_no_averaging():
    waited_ms = []

    def meet(rank: int) -> None:
        start = perf_counter()
        sum(range(1_000_000))
        waited_ms.append((perf_counter() - start) * 1e3)

    mean = HostMean([FlatReplica(model(rank), rank) for rank in (0, 1)], on_cpu(2), meet)
    outcome = Outcome(0, 2, (0, 1), (1, 1), (5, 5))
    mean.launch(outcome)
    start = perf_counter()
    result = mean.average(0, outcome)()
    total_ms = (perf_counter() - start) * 1e3
    assert result.sync_ms > 0.0
    assert not waited_ms or result.sync_ms <= total_ms - waited_ms[0]


def test_a_round_without_samples_changes_nothing():
    world = World(2)
    before = world.states()
    assert world.hold([0, 0]) == [Averaging(0.0, None)] * 2
    for state, old in zip(world.states(), before, strict=True):
        assert all(torch.equal(state[name], old[name]) for name in old)


def test_replicas_that_differ_are_refused():
    replicas = [FlatReplica(nn.Linear(2, width), rank) for rank, width in enumerate((2, 3))]
    with pytest.raises(OptionError, match=r"'weight' is .*\(3, 2\).* on rank 1 and .*\(2, 2\).* on rank 0"):
        HostMean(replicas, on_cpu(2), lambda rank: None)


# ---------------------------------------------------------------- host memory for other layouts
@pytest.mark.parametrize("samples", [(5, 3), (5, 3, 9), (4, 0, 9)])
@pytest.mark.parametrize("drift", [False, True])
def test_the_layout_may_lie_on_a_device_that_the_host_cannot_reach(samples, drift):
    """As when devices are averaged in pinned memory: everything is allocated on the host."""
    splits = {torch.float32: 400, torch.bfloat16: 400, torch.int64: 0}
    layout = [Flat(torch.empty(600, dtype=dtype, device="meta"), split) for dtype, split in splits.items()]
    draw = torch.Generator().manual_seed(0)
    memories = [[(9 * torch.randn(600, generator=draw)).to(dtype) for dtype in splits] for _ in samples]
    before = [[memory.double() for memory in rank] for rank in memories]
    everyone = threading.Barrier(len(samples))
    mean = MemoryMean(layout, memories, lambda rank: everyone.wait(60) and None)
    ranks = tuple(range(len(samples)))
    outcome = Outcome(0, 0, ranks, (1,) * len(samples), samples, drift=drift)
    mean.launch(outcome)
    results = in_threads(ranks, lambda rank: mean.average(rank, outcome))
    gave = [drift and count > 0 for count in samples]
    assert [result.drift is not None for result in results] == gave, results
    for at, (memory, flat) in enumerate(zip(memories[0], layout, strict=True)):
        columns = torch.stack([rank[at] for rank in before])
        weights = torch.tensor(samples)[:, None] / sum(samples)
        wanted = columns.amax(0) if flat.counts else (weights * columns).sum(0)
        assert torch.allclose(memory.double(), wanted, rtol=2**-7, atol=1e-2)
        assert all(torch.equal(rank[at], memory) for rank in memories)


# ---------------------------------------------------------------- on CUDA streams; see test_on_streams.py too
@pytest.fixture
def world(monkeypatch) -> FakeWorld:
    monkeypatch.setattr(base, "BLOCK", 256)
    world = FakeWorld(host_mean, (0, 1, 1))
    book_on_host(monkeypatch, world)
    world.hold([1, 2, 3], steps=1)
    assert world.cuda.races == []
    return world


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
    monkeypatch.setattr(memory_mean, "SMALL", 0)
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
