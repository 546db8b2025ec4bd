"""Tests of making communicators, and of their end; on a fake NCCL that really sums."""

import threading
from time import monotonic

import pytest
import torch

from flowdp.collective import communicators
from flowdp.collective.communicators import CommunicatorSetup
from flowdp.collective.nccl_sums import Side
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import QUIET, StreamLane
from flowdp.errors import CollectiveError
from tests.collective.fake_nccl import FakeNccl, NcclError
from tests.fakes import FakeCuda
from tests.limits import HANG_S


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
        self.lanes = [StreamLane(torch.device("cuda", card), self.cuda) for card in cards]
        self.flats = [flats(rank) for rank in range(len(cards))]
        self.nccl = FakeNccl(self.cuda, self.lanes)
        self.opening = CommunicatorSetup(self.nccl, self.lanes, self.flats)

    def late_when_it_hangs(self, monkeypatch):
        """End the time for hanging calls as soon as one hangs."""
        mark = self.opening._is_made if self.nccl.hangs == "make" else self.opening._is_over
        monkeypatch.setattr(mark, "wait", lambda _: not self.nccl.hanging.wait(HANG_S))

    def hang_on_the_device(self, monkeypatch):
        """Make sums that are enqueued and do not end before an abort."""
        real = Side.distance

        def distance(side, value, count):
            self.nccl.hanging.set()
            assert self.nccl.wake.wait(HANG_S)
            return real(side, value, count)

        monkeypatch.setattr(Side, "distance", distance)
        self.late_when_it_hangs(monkeypatch)


SPANS = 12 * 16


def cut_flats(rank: int) -> list[Flat]:
    return [
        Flat(torch.cat([torch.full((SPANS,), rank + 1.0), torch.ones(5)]), SPANS, spans=3),
        Flat(torch.full((2 * SPANS,), rank + 1.0).bfloat16(), 2 * SPANS, spans=3),
        Flat(torch.ones(8), 8),
    ]


def wait_for_the_helper():
    assert communicators._MAKING.acquire(timeout=HANG_S)
    communicators._MAKING.release()


@pytest.mark.parametrize("cards", [(0,), (0, 1), (0, 1, 2, 3)])
def test_communicators_are_made_and_checked_and_nothing_is_changed(cards):
    world = Group(cards)
    before = [[flat.memory.clone() for flat in rank] for rank in world.flats]
    comms = world.opening.wait()
    assert [comm.rank for comm in comms] == list(range(len(cards)))
    # The sizes of all later sums, and two extra numbers.
    assert [counts for _, counts in world.nccl.groups] == [[200, 100, 70, 40, 40, 2]] * (
        2 if len(cards) > 1 else 1
    )
    for rank, olds in zip(world.flats, before, strict=True):
        assert all(torch.equal(flat.memory, old) for flat, old in zip(rank, olds, strict=True))
    assert not communicators._MAKING.locked()


def test_each_communicator_is_made_with_its_device_current(monkeypatch):
    world = Group()
    current = []
    real = world.nccl.NcclCommunicator

    def make(ndev, name, rank):
        current.append(world.cuda.current_stream())
        return real(ndev, name, rank)

    monkeypatch.setattr(world.nccl, "NcclCommunicator", make)
    world.opening.wait()
    assert current == [lane.comm for lane in world.lanes]


def test_wrong_sums_are_found_by_value():
    world = Group()
    world.nccl.broken = True
    with pytest.raises(CollectiveError, match=r"on cuda:0, cuda:1, cuda:2 gives rank 0 wrong sums"):
        world.opening.wait()
    assert sorted(world.nccl.aborted) == [0, 1, 2]
    assert world.nccl.abused == []


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("make", r"did not make its communicators for cuda:0, cuda:1, cuda:2 within 120 s; NCCL_DEBUG=INFO"),
        ("sum", r"first sums on cuda:0, .* were not there within 10 s.*NCCL_P2P_DISABLE=1 helps"),
    ],
)
def test_what_hangs_inside_nccl_aborts_itself_when_it_comes_back(monkeypatch, stage, said, fails):
    """An abort during a call would free memory that the call uses."""
    world = Group()
    world.nccl.hangs, world.nccl.fails = stage, fails
    world.late_when_it_hangs(monkeypatch)
    with pytest.raises(CollectiveError, match=said) as caught:
        world.opening.wait()
    assert ("P2P" in str(caught.value)) is (stage == "sum")
    assert world.nccl.aborted == []
    world.nccl.wake.set()
    wait_for_the_helper()
    assert sorted(world.nccl.aborted) == [0, 1, 2]
    assert world.nccl.abused == []
    assert len(world.nccl.groups) == (stage == "sum" and not fails)


def test_what_hangs_on_the_device_is_aborted_at_once_and_sums_no_more(monkeypatch):
    world = Group()
    world.hang_on_the_device(monkeypatch)
    with pytest.raises(CollectiveError, match="first sums"):
        world.opening.wait()
    assert sorted(world.nccl.aborted) == [0, 1, 2]
    wait_for_the_helper()
    assert sorted(world.nccl.aborted) == [0, 1, 2]
    assert world.nccl.abused == []
    assert len(world.nccl.groups) == 1


def test_what_hangs_even_when_aborted_is_left_alone(monkeypatch):
    monkeypatch.setattr(communicators, "ABORT_S", 0.05)
    world, later = Group(), Group()
    world.hang_on_the_device(monkeypatch)
    world.nccl.deaf = True
    start_s = monotonic()
    try:
        with pytest.raises(CollectiveError, match="first sums"):
            world.opening.wait()
        with pytest.raises(CollectiveError, match="still hangs"):
            later.opening.wait(making_s=0.05)
        assert monotonic() - start_s < HANG_S / 2  # the fakes hang longer
    finally:
        world.nccl.wake.set()
    wait_for_the_helper()  # the hung call releases the lock when it ends


def test_ctrl_c_leaves_no_communicator(monkeypatch):
    world = Group()
    world.hang_on_the_device(monkeypatch)

    def wait(timeout):
        world.nccl.hanging.wait(HANG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(world.opening._is_over, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        world.opening.wait()
    wait_for_the_helper()
    assert sorted(world.nccl.aborted) == [0, 1, 2]
    assert world.nccl.abused == []


def test_what_is_checked_is_allocated_while_nobody_launches(monkeypatch):
    seen = []
    real = communicators.Side
    monkeypatch.setattr(communicators, "Side", lambda *given: seen.append(QUIET.locked()) or real(*given))
    world = Group()
    world.opening.wait()
    assert seen == [True] * 3
    assert [is_quiet for is_quiet, _ in world.nccl.groups] == [False] * 2  # a hang would keep it held


@pytest.mark.parametrize("error", [NcclError("unhandled cuda error"), KeyError(7)])
def test_what_cupy_raises_is_explained(monkeypatch, error):
    world = Group()

    def make(*_):
        world.nccl._group.made.clear()
        raise error

    monkeypatch.setattr(world.nccl, "NcclCommunicator", make)
    with pytest.raises(CollectiveError, match="NCCL could not make communicators for cuda:0"):
        world.opening.wait()


def test_aborts_run_side_by_side(monkeypatch):
    both = threading.Barrier(2)

    class Comm:
        def abort(self):
            both.wait(HANG_S)

    communicators.abort_all([Comm(), Comm()])
    assert not both.broken


@pytest.mark.parametrize("kind", ["reduceScatter", "allGather"])
def test_spans_that_do_not_arrive_are_found_by_value(kind):
    world = Group()
    world.nccl.lost = {kind}
    with pytest.raises(CollectiveError, match=r"gives rank \d wrong sums"):
        CommunicatorSetup(world.nccl, world.lanes, [cut_flats(rank) for rank in range(3)]).wait()
