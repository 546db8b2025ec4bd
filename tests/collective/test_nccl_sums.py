"""Tests of one sum: weights, spans, and what a launch allocates; on a fake NCCL that really sums."""

import random
from functools import partial
from itertools import chain

import pytest
import torch

from flowdp.collective.communicators import CommunicatorSetup
from flowdp.collective.nccl_sums import Side, gather_calls, launch_group, sum_replicas
from flowdp.device.flat_parameters import Flat
from tests.collective.test_communicators import SPANS, Group, cut_flats, flats


def test_weights_are_exact_and_their_sum_is():
    world = Group()
    comms = world.opening.wait()
    sides = [Side(world.nccl, lane, rank) for lane, rank in zip(world.lanes, world.flats, strict=True)]
    sum_replicas(partial(launch_group, world.nccl, comms), sides, [3, 0, 7], drift=True)
    weight, square, mean_square = sides[1].tail.tolist()
    assert weight == 10 / 16
    parameters = [[rank[0].memory[:200].double(), rank[1].memory.double()] for rank in [flats(0), flats(2)]]
    norms = [sum(float(p.square().sum()) for p in given) for given in parameters]
    assert square == pytest.approx((3 * norms[0] + 7 * norms[1]) / 16, rel=1e-5)
    mean = [(3 * a + 7 * b) / 10 for a, b in zip(*parameters, strict=True)]
    assert mean_square == pytest.approx(sum(float(m.square().sum()) for m in mean), rel=1e-5)


def test_a_launch_makes_no_memory(monkeypatch):
    """Within a group, an allocation may wait for a kernel that waits for a later launch."""
    world = Group()
    comms = world.opening.wait()
    sides = [Side(world.nccl, lane, rank) for lane, rank in zip(world.lanes, world.flats, strict=True)]
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {id(t) for t in torch.utils._pytree.tree_leaves((args, kwargs))}
            result = func(*args, **(kwargs or {}))
            made.extend(func for t in torch.utils._pytree.tree_leaves(result) if id(t) not in given)
            return result

    bad = [torch.tensor(False), None, torch.tensor(True)]
    for samples in ([3, 0, 7], [4, 4, 4]):
        for drift in (True, False):
            with Watch():
                sum_replicas(partial(launch_group, world.nccl, comms), sides, samples, drift=drift, bad=bad)
    assert made == []


def test_each_rank_gets_the_mean_of_its_span_and_the_spans_of_all():
    world = Group()
    world.flats = [cut_flats(rank) for rank in range(3)]
    places = list(zip(world.lanes, world.flats, range(3), strict=True))
    world.opening = CommunicatorSetup(world.nccl, world.lanes, world.flats)
    comms = world.opening.wait()
    sides = [Side(world.nccl, *place) for place in places]
    for samples in ([1, 1, 1], [3, 0, 7]):
        for own, fresh in zip(world.flats, map(cut_flats, range(3)), strict=True):
            for mine, new in zip(own, fresh, strict=True):
                mine.memory.copy_(new.memory)
        mean = sum(count * (rank + 1) for rank, count in enumerate(samples)) / sum(samples)
        sum_replicas(partial(launch_group, world.nccl, comms), sides, samples, drift=False)
        for rank, own in enumerate(world.flats):
            for flat in own[:2]:
                assert flat.memory[flat.span(rank)].float().sub(mean).abs().max() < 0.01
        launch_group(world.nccl, comms, [gather_calls(world.nccl, *place) for place in places])
        for flat in chain.from_iterable(own[:2] for own in world.flats):
            assert flat.memory[: flat.split].float().sub(mean).abs().max() < 0.01
    assert all(torch.equal(own[0].memory[SPANS:], torch.ones(5)) for own in world.flats)


def test_a_constant_buffer_keeps_its_bits_over_many_rounds():
    """Such as tables of positions or normalisation constants: their bits never change."""
    draw = random.Random(3)
    constant = torch.rand(96, generator=torch.Generator().manual_seed(3))
    world = Group()
    world.flats = [[Flat(torch.cat([torch.randn(64), constant]), 64)] for _ in world.lanes]
    sides = [Side(world.nccl, lane, rank) for lane, rank in zip(world.lanes, world.flats, strict=True)]
    comms = world.opening.wait()
    for _ in range(300):
        samples = [draw.randint(0, 4096), draw.randint(1, 4096), draw.randint(1, 77)]
        sum_replicas(partial(launch_group, world.nccl, comms), sides, samples, drift=False)
    assert all(torch.equal(rank[0].memory[64:], constant) for rank in world.flats)
