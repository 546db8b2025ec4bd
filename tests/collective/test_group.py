"""Communicators in the making, and one sum; on a fake NCCL that really sums."""

import threading
from time import monotonic

import pytest
import torch

from flowdp.collective import group
from flowdp.collective.group import Opening, Side, sum_replicas
from flowdp.device.streams import CudaLane
from flowdp.device.tensors import Flat
from flowdp.errors import CollectiveError
from tests.collective.fake_nccl import FakeNccl, NcclError
from tests.fakes import FakeCuda


def flats(rank: int) -> list[Flat]:
    draw = torch.Generator().manual_seed(rank)
    return [
        Flat(torch.randn(300, generator=draw), 200),
        Flat(torch.randn(70, generator=draw).bfloat16(), 70),
        Flat(torch.randint(-9, 9, (40,), generator=draw).short(), 0),
        Flat(torch.randint(0, 2, (40,), generator=draw).bool(), 0),
        Flat(torch.empty(0), 0),
    ]


class Group:
    """Lanes, flats and a fake NCCL."""

    def __init__(self, cards=(0, 1, 2)):
        self.cuda = FakeCuda()
        self.lanes = [CudaLane(torch.device("cuda", card), self.cuda) for card in cards]
        self.flats = [flats(rank) for rank in range(len(cards))]
        self.nccl = FakeNccl(self.cuda, self.lanes)
        self.opening = Opening(self.nccl, self.lanes, self.flats)


@pytest.mark.parametrize("cards", [(0,), (0, 1), (0, 1, 2, 3)])
def test_communicators_are_made_and_checked_and_nothing_is_changed(cards):
    world = Group(cards)
    before = [[flat.memory.clone() for flat in rank] for rank in world.flats]
    comms = world.opening.wait(10)
    assert [comm.rank for comm in comms] == list(range(len(cards)))
    # The sizes of all later sums, and the two numbers that ride along.
    assert [counts for _, counts in world.nccl.groups] == [[300, 70, 40, 40, 2]] * (
        2 if len(cards) > 1 else 1
    )
    for rank, olds in zip(world.flats, before, strict=True):
        assert all(torch.equal(flat.memory, old) for flat, old in zip(rank, olds, strict=True))
    assert not group._MAKING.locked()


def test_several_ranks_on_a_device_are_made_by_one_call(monkeypatch):
    world = Group((0, 0, 1))
    asked = []
    real = world.nccl.NcclCommunicator.initAll
    monkeypatch.setattr(
        world.nccl.NcclCommunicator,
        "initAll",
        staticmethod(lambda devices: asked.append(devices) or real(devices)),
    )
    assert len(world.opening.wait(10)) == 3
    assert asked == [[0, 0, 1]]


def test_each_communicator_is_made_with_its_device_current(monkeypatch):
    world = Group()
    current = []
    real = world.nccl.NcclCommunicator

    def make(ndev, name, rank):
        current.append(world.cuda.current_stream())
        return real(ndev, name, rank)

    monkeypatch.setattr(world.nccl, "NcclCommunicator", make)
    world.opening.wait(10)
    assert current == [lane.comm for lane in world.lanes]


def test_wrong_sums_are_found_by_value():
    world = Group()
    world.nccl.broken = True
    with pytest.raises(CollectiveError, match=r"on cuda:0, cuda:1, cuda:2 gives rank 0 wrong sums"):
        world.opening.wait(10)
    assert sorted(world.nccl.aborted) == [0, 1, 2]


@pytest.mark.parametrize(("stage", "said"), [("make", "making its communicators"), ("sum", "its first sums")])
def test_what_hangs_is_aborted_and_named(stage, said):
    world = Group()
    world.nccl.hangs = stage
    start_s = monotonic()
    with pytest.raises(CollectiveError, match=rf"did not get beyond {said} .* within 0\.05 s"):
        world.opening.wait(0.05)
    assert monotonic() - start_s < 5
    assert set(world.nccl.aborted) == {0, 1, 2}


def test_what_hangs_even_when_aborted_is_left_alone(monkeypatch):
    monkeypatch.setattr(group, "ABORT_S", 0.05)
    world, later = Group(), Group()
    world.nccl.hangs, world.nccl.deaf = "sum", True
    start_s = monotonic()
    try:
        with pytest.raises(CollectiveError, match="its first sums"):
            world.opening.wait(0.05)
        with pytest.raises(CollectiveError, match="still hangs"):
            later.opening.wait(0.05)
        assert monotonic() - start_s < 5
    finally:
        world.nccl.wake.set()
    assert group._MAKING.acquire(timeout=20)  # what hung gives it back when it ends
    group._MAKING.release()


def test_communicators_that_come_too_late_are_aborted():
    world = Group((0, 0))  # made by one call, so nobody has seen them before
    world.nccl.hangs = "late"
    with pytest.raises(CollectiveError, match="making its communicators"):
        world.opening.wait(0.05)
    assert world.nccl.aborted == []
    world.nccl.wake.set()
    assert group._MAKING.acquire(timeout=20)
    group._MAKING.release()
    assert sorted(world.nccl.aborted) == [0, 1]


@pytest.mark.parametrize("error", [NcclError("unhandled cuda error"), KeyError(7)])
def test_what_cupy_raises_is_explained(monkeypatch, error):
    world = Group()

    def make(*_):
        world.nccl._group.made.clear()
        raise error

    monkeypatch.setattr(world.nccl, "NcclCommunicator", make)
    with pytest.raises(CollectiveError, match="NCCL could not make communicators for cuda:0"):
        world.opening.wait(10)


def test_a_sum_needs_all_ranks():
    world = Group()
    comms = world.opening.wait(10)
    sides = [Side(world.nccl, lane, rank) for lane, rank in zip(world.lanes, world.flats, strict=True)]
    with pytest.raises(AssertionError, match=r"only ranks \[0, 1\] of 3"):
        sum_replicas(world.nccl, comms[:2], sides[:2], [1, 2], drift=False)


def test_weights_are_exact_and_their_sum_is():
    world = Group()
    comms = world.opening.wait(10)
    sides = [Side(world.nccl, lane, rank) for lane, rank in zip(world.lanes, world.flats, strict=True)]
    sum_replicas(world.nccl, comms, sides, [3, 0, 7], drift=True)
    weight, square, mean_square = sides[1].tail.tolist()
    assert weight == 10 / 16
    parameters = [[rank[0].memory[:200].double(), rank[1].memory.double()] for rank in [flats(0), flats(2)]]
    norms = [sum(float(p.square().sum()) for p in given) for given in parameters]
    assert square == pytest.approx((3 * norms[0] + 7 * norms[1]) / 16, rel=1e-5)
    mean = [(3 * a + 7 * b) / 10 for a, b in zip(*parameters, strict=True)]
    assert mean_square == pytest.approx(sum(float(m.square().sum()) for m in mean), rel=1e-5)


def test_a_launch_makes_no_memory(monkeypatch):
    """In the window of a group an allocation may wait for a kernel that waits for a launch behind it."""
    world = Group()
    comms = world.opening.wait(10)
    sides = [Side(world.nccl, lane, rank) for lane, rank in zip(world.lanes, world.flats, strict=True)]
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {id(t) for t in torch.utils._pytree.tree_leaves((args, kwargs))}
            result = func(*args, **(kwargs or {}))
            made.extend(func for t in torch.utils._pytree.tree_leaves(result) if id(t) not in given)
            return result

    with Watch():
        sum_replicas(world.nccl, comms, sides, [3, 0, 7], drift=True)
    assert made == []


def test_aborts_run_side_by_side(monkeypatch):
    both = threading.Barrier(2)

    class Comm:
        def abort(self):
            both.wait(20)

    group.abort_all([Comm(), Comm()])
    assert not both.broken
