"""Tests of the mean in host memory; what all means share is in test_on_streams.py."""

from time import perf_counter

import pytest
import torch

from flowdp.collective import host
from flowdp.collective import mean as mean_module
from flowdp.collective.host import HostMean
from flowdp.collective.mean import BlockMean, Site
from flowdp.device.flat_gradients import SharedGradients
from flowdp.device.flat_parameters import Flat, FlatReplica
from flowdp.device.streams import QUIET, open_lanes
from flowdp.errors import CollectiveAborted
from flowdp.protocol.messages import Arrival, Outcome
from tests.collective.fake_world import FakeWorld, book_on_host, host_mean, in_threads, model


@pytest.fixture(params=["alone", "together"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to reduce: by the last arrival, as for small models, and by all members."""
    if request.param == "together":
        monkeypatch.setattr(host, "SMALL", 0)
    return request.param


def test_bits_do_not_depend_on_who_is_faster(monkeypatch):
    monkeypatch.setattr(mean_module, "BLOCK", 256)
    seen = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]) * 2:
        world = FakeWorld(host_mean, (-1, -1, -1))
        world.hold([5, 3, 9], ranks=order, drift=True)
        seen.append(torch.cat([memory.double() for memory in world.replicas[0].memories]))
    assert all(torch.equal(memory, seen[0]) for memory in seen)


def test_gradients_that_are_not_numbers_and_give_nothing_are_left_out():
    """Their weight and the buffers are left out as well."""

    def make(world: FakeWorld) -> HostMean:
        pairs = zip(world.replicas, world.modules, strict=True)
        return HostMean(
            [SharedGradients(pair[0]) for pair in pairs], world.lanes, lambda r: world.gate.finish(r)
        )

    world = FakeWorld(make, (-1, -1, -1))
    gradients = world.mean._replicas
    for rank, (module, own) in enumerate(zip(world.modules, gradients, strict=True)):
        value = torch.nan if rank == 1 else 2.0 * rank + 1
        for parameter in module.parameters():
            parameter.grad.fill_(value)
        own.weight.fill_(value)
        own.is_weighted = True
        module[1].running_mean.fill_(value)
    world.read(world.hold([3, 0, 1]))
    for module, own in zip(world.modules, gradients, strict=True):
        assert all(bool((parameter.grad == 2.0).all()) for parameter in module.parameters())
        assert own.weight == 2.0
        assert bool((module[1].running_mean == 2.0).all())


def test_waiting_is_no_averaging():
    waited_ms = []

    def meet(rank: int) -> None:
        start = perf_counter()
        sum(range(1_000_000))
        waited_ms.append((perf_counter() - start) * 1e3)

    lanes = open_lanes([torch.device("cpu")] * 2)
    mean = HostMean([FlatReplica(model(rank), rank) for rank in (0, 1)], lanes, meet)
    outcome = Outcome(0, 2, (0, 1), (1, 1), (5, 5))
    mean.launch(outcome)
    start = perf_counter()
    result = mean.average(0, outcome)()
    total_ms = (perf_counter() - start) * 1e3
    assert result.sync_ms > 0.0
    assert not waited_ms or result.sync_ms <= total_ms - waited_ms[0]


# ---------------------------------------------------------------- host memory for other layouts
@pytest.mark.parametrize(("samples", "drift"), [((5, 3), False), ((4, 0, 9), True)])
def test_the_layout_may_lie_on_a_device_that_the_host_cannot_reach(samples, drift):
    """As when devices are averaged in pinned memory: everything is allocated on the host."""
    splits = {torch.float32: 400, torch.bfloat16: 400, torch.int64: 0}
    layout = [Flat(torch.empty(600, dtype=dtype, device="meta"), split) for dtype, split in splits.items()]
    draw = torch.Generator().manual_seed(0)
    memories = [[(9 * torch.randn(600, generator=draw)).to(dtype) for dtype in splits] for _ in samples]
    before = [[memory.double() for memory in rank] for rank in memories]
    squares = BlockMean(layout, memories, memories, site=Site(torch.device("cpu"))).reduce(
        samples, drift=drift
    )
    assert (squares is not None) == drift
    if squares is not None:
        assert [bool(square) for square in squares[:-1]] == [count > 0 for count in samples]
    for at, (memory, flat) in enumerate(zip(memories[0], layout, strict=True)):
        columns = torch.stack([rank[at] for rank in before])
        weights = torch.tensor(samples)[:, None] / sum(samples)
        wanted = columns.amax(0) if flat.counts else (weights * columns).sum(0)
        assert torch.allclose(memory.double(), wanted, rtol=2**-7, atol=1e-2)
        assert all(torch.equal(rank[at], memory) for rank in memories)


# ---------------------------------------------------------------- on CUDA streams; see test_on_streams.py too
@pytest.fixture
def world(monkeypatch) -> FakeWorld:
    monkeypatch.setattr(mean_module, "BLOCK", 256)
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


@pytest.mark.parametrize("cards", [(0, 1), (-1, -1)])
def test_an_abort_releases_who_waits_for_the_others(monkeypatch, cards):
    monkeypatch.setattr(host, "SMALL", 0)
    world = FakeWorld(host_mean, cards)

    def body(rank: int) -> object:
        lane = world.lanes[rank]
        with lane.on(lane.compute):
            world.mean.prepare(rank)
            outcome = world.gate.enter(Arrival(rank, 0, 0, 1, 1))
            if rank == 0:
                return world.mean.average(rank, outcome)()
            world.gate.abort("rank 1 failed")
            world.mean.abort()
            return None

    first, _ = in_threads([0, 1], body)
    assert isinstance(first, CollectiveAborted)
    assert "rank 1 failed" in str(first)
    world.mean.close()
