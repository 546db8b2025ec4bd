"""Tests of the NCCL loop: one thread sends and sums for all ranks, on a fake NCCL that really sums."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flowdp.collective import nccl_loop, nccl_setup
from flowdp.collective.nccl_loop import NcclLoop
from flowdp.device.streams import QUIET, StreamLane
from flowdp.errors import CollectiveError
from tests.collective.fake_nccl import FakeNccl, NcclError
from tests.fakes import FakeCuda

CPU = torch.device("cpu")
SIZES = {torch.float32: 100, torch.bfloat16: 30}
WAIT_S = 60.0


class World:
    """Three ranks on fake streams."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.lanes = [StreamLane(CPU, self.cuda) for _ in range(3)]
        self.nccl = FakeNccl(self.cuda, self.lanes)
        self.loop: NcclLoop

    def open(self) -> NcclLoop:
        self.loop = NcclLoop(self.lanes, SIZES, nccl=self.nccl)
        self.nccl.kinds.clear()
        self.nccl.groups.clear()
        return self.loop

    def rows(self) -> list[list[Tensor]]:
        made = [[torch.full((5,), rank + 1.0), torch.full((3,), rank + 1.0).bfloat16()] for rank in range(3)]
        self.cuda.watch("rows", *(row for own in made for row in own))
        return made


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    if hasattr(made, "loop"):
        made.loop.close()
    assert not made.cuda.races
    assert not made.nccl.abused


def values(rows: list[list[Tensor]]) -> list[list[float]]:
    return [[float(row.mean()) for row in own] for own in rows]


def test_every_call_does_what_it_says_while_all_is_quiet(world: World) -> None:
    loop = world.open()
    with world.cuda.stream(world.cuda.default):  # the caller's: its work is ordered with the ranks'
        for call, wanted in ((loop.broadcast, [1, 1, 1]), (loop.all_reduce, [6, 6, 6]), (loop.reduce, [6])):
            rows = world.rows()
            for own in rows:
                own[0].add_(0.0)
            call(rows)
            found = values(rows)
            assert found[: len(wanted)] == [[want, want] for want in wanted]
            for own in rows:
                own[0].add_(1.0)
    assert world.nccl.kinds == ["broadcast", "allReduce", "reduce"]
    assert world.nccl.groups == [(True, [20, 6]), (True, [5, 3]), (True, [5, 3])]
    assert not QUIET.locked()


def test_what_a_thread_of_a_rank_does_next_comes_after_the_sum(world: World) -> None:
    rows = world.rows()
    world.open().reduce(rows)
    for lane, own in zip(world.lanes[1:], rows[1:], strict=True):
        with lane.on(lane.compute):
            own[0].zero_()


def test_an_error_of_nccl_ends_its_use(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = world.open()

    def refuse(group: object) -> None:
        raise NcclError("unhandled system error")

    monkeypatch.setattr(world.nccl, "_end", refuse)
    with pytest.raises(CollectiveError, match=r"NCCL could not reduce on cpu, cpu, cpu: .*unhandled"):
        loop.reduce(world.rows())
    assert sorted(world.nccl.aborted) == [0, 1, 2]
    with pytest.raises(CollectiveError, match="unhandled system error"):
        loop.broadcast(world.rows())
    assert not QUIET.locked()


def test_closing_gives_the_communicators_back_once(world: World) -> None:
    loop = world.open()
    loop.close()
    loop.close()
    assert world.nccl.destroyed == [0, 1, 2]
    with pytest.raises(CollectiveError, match="aborted or closed"):
        loop.broadcast(world.rows())


def test_closing_under_a_launch_waits_for_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the garbage collector closes a loop in the middle of another one's launch."""
    monkeypatch.setattr(nccl_setup, "ABORT_S", 0.01)
    loop = world.open()
    with QUIET:
        loop.close()
        assert not world.nccl.destroyed
        (later,) = [thread for thread in threading.enumerate() if thread.name == "flowdp-nccl-close"]
    later.join(WAIT_S)
    assert world.nccl.destroyed == [0, 1, 2]


def test_an_interrupt_waits_for_the_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the edges after it: released rows may be allocated again."""
    told: list[tuple[int, int]] = []

    class Held:
        def __enter__(self) -> None:
            told.append((len(world.nccl.kinds), len(world.cuda.log)))

        def __exit__(self, *_: object) -> None:
            told.append((len(world.nccl.kinds), len(world.cuda.log)))

    world.loop = NcclLoop(world.lanes, SIZES, nccl=world.nccl)
    monkeypatch.setattr(nccl_loop, "interrupts_held", Held)
    before = len(world.nccl.kinds), len(world.cuda.log)
    world.loop.reduce(world.rows())
    after = len(world.nccl.kinds), len(world.cuda.log)
    assert told == [before, after]
