import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.mean import BlockMean
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import QUIET, HostLane
from flowdp.errors import ProtocolError
from tests.collective.fake_world import (
    FakeWorld,
    host_mean,
    in_threads,
)

CPU = torch.device("cpu")


def replicas(world_size: int = 2) -> tuple[list[nn.Module], list[FlatReplica]]:
    modules = []
    for rank in range(world_size):
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4).to(torch.bfloat16))
        module[1].running_var.uniform_(0.5, 2.0)
        module[1].num_batches_tracked.fill_(3 + rank)
        modules.append(module)
    return modules, [FlatReplica(module, rank) for rank, module in enumerate(modules)]


def on_host(flat: list[FlatReplica]) -> SnapshotMean:
    return SnapshotMean(flat, [HostLane(CPU) for _ in flat])


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def hold(snapshots: SnapshotMean, round: int, samples: list[int]) -> tuple[float, ...]:
    for rank in range(len(samples)):
        snapshots.take(rank, round)
    _, drifts = snapshots.average(round, samples)
    return drifts


def apply_together(snapshots: SnapshotMean, round: int, world_size: int) -> None:
    """All ranks apply at once, each in its own thread."""
    done = in_threads(range(world_size), lambda rank: snapshots.apply(rank, round, 1))
    assert done == [None] * world_size


def test_local_steps_are_kept():
    modules, flat = replicas(3)
    snapshots, samples = on_host(flat), [5, 3, 2]
    before = [state(module) for module in modules]
    hold(snapshots, 7, samples)
    steps = []
    for rank, module in enumerate(modules):
        step = {name: torch.randn_like(p) * 0.1 for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.data.add_(step[name])
        module[1].running_var.fill_(99.0)  # local, to be replaced
        module[1].num_batches_tracked.fill_(20 if rank == 1 else 4)
        steps.append(step)
    local = [state(module) for module in modules]
    apply_together(snapshots, 7, 3)
    for rank, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            mean = sum(n * s[name].double() for n, s in zip(samples, before, strict=True)) / 10
            wanted = local[rank][name].double() + mean - before[rank][name].double()
            tolerance = 2**-8 if parameter.dtype == torch.bfloat16 else 1e-6
            assert torch.allclose(parameter.double(), wanted, rtol=tolerance, atol=tolerance), name
        variance = sum(n * s["1.running_var"] for n, s in zip(samples, before, strict=True)) / 10
        assert torch.allclose(module[1].running_var, variance)
        # 5 is the greatest captured count, and rank 1 has counted further since.
        assert int(module[1].num_batches_tracked) == (20 if rank == 1 else 5)


def test_the_mean_of_bfloat16_parameters_is_kept_in_float32():
    modules, flat = replicas()
    for module, value in zip(modules, (1.0, 1.0078125), strict=True):  # neighbours in bfloat16
        module[2].weight.data.fill_(value)
    snapshots = on_host(flat)
    hold(snapshots, 0, [1, 1])
    # The mean is half a step between the two; at 0.25 that is one step of bfloat16, so a rounded mean would
    # show.
    modules[0][2].weight.data.fill_(0.25)
    snapshots.apply(0, 0, 1)
    assert bool((modules[0][2].weight == 0.25 + 0.00390625).all())


def test_ranks_that_have_not_stepped_since_are_equal_to_the_bit():
    """No meeting averages them, as none has samples; a difference that is added would round."""
    modules, flat = replicas(3)
    snapshots = on_host(flat)
    hold(snapshots, 0, [5, 3, 1])
    for rank in range(3):
        snapshots.apply(rank, 0, 0)
    first, *others = map(state, modules)
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_drift_is_the_distance_of_each_snapshot_from_the_mean():
    modules, flat = replicas(3)
    samples = [4, 0, 1]
    before = [nn.utils.parameters_to_vector([p.detach().double() for p in m.parameters()]) for m in modules]
    mean = (4 * before[0] + before[2]) / 5
    drifts = hold(on_host(flat), 0, samples)
    wanted = [float((vector - mean).norm() / mean.norm()) for vector in before]
    wanted[1] = 0.0  # of weight 0, and may hold NaN
    assert drifts == pytest.approx(wanted, rel=1e-3)


def test_a_snapshot_that_is_not_a_number_and_has_no_weight_is_left_out():
    modules, flat = replicas(3)
    for memory in flat[1].memories:
        if memory.dtype.is_floating_point:
            memory.fill_(torch.nan)
    snapshots = on_host(flat)
    drifts = hold(snapshots, 0, [4, 0, 1])
    assert drifts[1] == 0.0
    assert all(0.1 < drifts[rank] < 10 for rank in (0, 2))
    apply_together(snapshots, 0, 3)
    for rank in (0, 2):
        assert all(bool(tensor.isfinite().all()) for tensor in modules[rank].state_dict().values())


def test_a_snapshot_of_another_round_is_never_averaged():
    _, flat = replicas()
    snapshots = on_host(flat)
    snapshots.take(0, 1)
    snapshots.take(1, 0)
    with pytest.raises(ProtocolError, match="snapshot of rank 1 is of round 0, not of round 1"):
        snapshots.average(1, [2, 2])
    with pytest.raises(ProtocolError, match="rank 0 was told to apply round 1"):
        snapshots.apply(0, 1, 1)


def test_a_rank_without_samples_need_not_have_a_snapshot():
    modules, flat = replicas()
    snapshots = on_host(flat)
    before = state(modules[0])
    snapshots.take(1, 0)  # late, so of weight 0 in round 1
    snapshots.take(0, 1)
    _, drifts = snapshots.average(1, [2, 0])
    assert drifts == (0.0, 0.0)
    snapshots.apply(0, 1, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in modules[0].state_dict().items())
    with pytest.raises(ProtocolError, match="its snapshot is of round 0"):
        snapshots.apply(1, 1, 1)


def test_a_mean_is_applied_once():
    _, flat = replicas()
    snapshots = on_host(flat)
    hold(snapshots, 0, [1, 1])
    snapshots.apply(0, 0, 1)
    with pytest.raises(ProtocolError, match="of round None"):
        snapshots.apply(0, 0, 1)


def test_what_a_module_moved_takes_part():
    modules, flat = replicas()
    snapshots = on_host(flat)
    moved = torch.full((5, 6), 4.0)
    modules[0][0].weight.data = moved
    other = modules[1][0].weight.detach().clone()
    hold(snapshots, 0, [1, 1])
    moved.add_(1.0)
    apply_together(snapshots, 0, 2)
    assert torch.allclose(moved, (4.0 + other) / 2 + 1.0)


# ---------------------------------------------------------------- on CUDA streams
WEIGHTS = [5, 3, 2]


class Async(FakeWorld):
    """Ranks that continue to train while a helper averages their snapshots."""

    def __init__(self, cards: Sequence[int]) -> None:
        super().__init__(host_mean, cards)
        self.snapshots = SnapshotMean(self.replicas, self.lanes)

    def take(self, round: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with self.lanes[rank].on(self.lanes[rank].compute):
                self.train(rank)
                self.snapshots.take(rank, round)
                self.train(rank)

    def average(self, round: int, samples: Sequence[int]) -> tuple[float, tuple[float, ...]]:
        """Average on a thread whose current stream is the default one."""
        (result,) = in_threads([0], lambda _: self.snapshots.average(round, samples))
        if isinstance(result, Exception):
            raise result
        return result

    def apply(self, round: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with self.lanes[rank].on(self.lanes[rank].compute):
                self.train(rank)
                self.snapshots.apply(rank, round, 1)
                self.train(rank)

    def watch(self) -> None:
        """Watch also the memory allocated by the first round."""
        for rank, slot in enumerate(self.snapshots._slots):
            self.cuda.watch(f"slot {rank}", *slot)
        for card, mean in self.snapshots._mean.items():
            self.cuda.watch(f"mean on {card}", *mean)

    def hold(self, round: int) -> None:
        self.take(round, [0, 1, 2])
        self.average(round, WEIGHTS)
        self.apply(round, [0, 1, 2])


@pytest.fixture(params=[(0, 0, 0), (0, 1, 1), (2, 0, 1), (-1, 0, 1)], ids=str)
def world(request: pytest.FixtureRequest) -> Async:
    world = Async(request.param)
    world.hold(0)
    world.watch()
    world.hold(1)
    assert world.cuda.races == []
    return world


def test_on_streams_the_mean_is_that_of_the_host():
    worlds = [Async(cards) for cards in ((-1, -1, -1), (0, 0, 0), (0, 1, 1), (-1, 1, -1))]
    drifts = []
    for world in worlds:
        world.take(0, [0, 1, 2])
        drifts.append(world.average(0, WEIGHTS)[1])
        world.apply(0, [0, 1, 2])
    assert drifts[1] == drifts[0]
    assert drifts[2] == pytest.approx(drifts[0], rel=1e-6)
    assert drifts[3] == pytest.approx(drifts[0], rel=1e-6)
    assert min(drifts[0]) > 0.1
    for other in worlds[1:]:
        for one, two in zip(worlds[0].states(), other.states(), strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("seed", range(2))
def test_no_race_in_random_rounds(world, seed):
    draw = random.Random(seed)
    for round in range(2, 16):
        ranks = sorted(draw.sample([0, 1, 2], draw.randint(1, 3)))
        world.take(round, ranks)
        if draw.random() < 0.2:
            continue  # given up
        world.average(round, [4 if rank in ranks else 0 for rank in range(3)])
        world.apply(round, draw.sample(ranks, len(ranks)))
    assert world.cuda.races == []


def test_the_default_stream_has_no_work(world, monkeypatch):
    def access(stream, *_):
        assert stream is not world.cuda.default

    monkeypatch.setattr(world.cuda, "access", access)
    world.hold(2)


def test_what_is_made_first_is_made_while_nobody_launches(monkeypatch):
    world = Async((0, 1, 1))
    seen = []
    real = BlockMean.reduce
    monkeypatch.setattr(
        BlockMean, "reduce", lambda *args, **given: (seen.append(QUIET.locked()), real(*args, **given))[1]
    )
    world.hold(0)
    assert seen == [True]
    assert not QUIET.locked()
