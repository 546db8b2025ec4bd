"""Tests of the NCCL loop: one thread sends and sums rows for all ranks, on a fake NCCL that really sums."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective import communicators, nccl_loop
from flowdp.collective.nccl_loop import NcclLoop, rows_like
from flowdp.device.copies import ALIGNMENT
from flowdp.device.streams import QUIET, StreamLane
from flowdp.errors import CollectiveError
from tests.collective.fake_nccl import FakeNccl, NcclError
from tests.fakes import FakeCuda
from tests.limits import HANG_S
from tests.loops import CPU

SIZES = {torch.float32: 100, torch.bfloat16: 30}


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
    monkeypatch.setattr(communicators, "ABORT_S", 0.01)
    loop = world.open()
    with QUIET:
        loop.close()
        assert not world.nccl.destroyed
        (later,) = [thread for thread in threading.enumerate() if thread.name == "flowdp-nccl-close"]
    later.join(HANG_S)
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


# ---------------------------------------------------------------- rows
KINDS: list[Tensor] = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(5.0).double(),
    torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    torch.complex(torch.arange(3.0), -torch.arange(3.0)),
    torch.tensor(7.0),
    torch.arange(4.0).bfloat16(),
    torch.arange(4.0).half(),
]


def test_what_is_packed_comes_back_with_its_strides() -> None:
    first, second = rows_like(KINDS, [CPU, CPU])
    assert first.fill(KINDS) == [True] * len(KINDS)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    assert [row.dtype for row in first.memories] == [row.dtype for row in second.memories] == dtypes
    for view, tensor in zip(first.views, KINDS, strict=True):
        assert view is not None
        assert torch.equal(view, tensor)
        assert view.stride() == tensor.stride()
        assert (
            view.data_ptr() - first.memories[0].data_ptr()
        ) % ALIGNMENT == 0 or view.dtype != torch.float32


def test_missing_tensors_are_zero() -> None:
    (rows,) = rows_like(KINDS, [CPU])
    rows.fill(KINDS)
    assert rows.fill([None, *KINDS[1:]]) == [False] + [True] * (len(KINDS) - 1)
    first, second, *_ = rows.views
    assert first is not None
    assert second is not None
    assert not first.any()
    assert torch.equal(second, KINDS[1])


def test_other_strides_and_conjugates_are_copied_into_form() -> None:
    (rows,) = rows_like(KINDS, [CPU])
    given = list(KINDS)
    given[0] = torch.ones(1, 1).expand(2, 3)
    given[2] = KINDS[2].contiguous()
    given[3] = KINDS[3].conj()
    rows.fill(given)
    for view, tensor in zip(rows.views, given, strict=True):
        assert view is not None
        assert torch.equal(view, tensor)


def test_what_has_no_place() -> None:
    class Special(nn.Parameter):
        pass

    odd = [torch.eye(2).to_sparse(), torch.arange(3), torch.empty(0), Special(torch.ones(2))]
    with torch.inference_mode():
        odd.append(torch.ones(2))
    (rows,) = rows_like(odd, [CPU])
    assert rows.views == [None] * 5
    assert rows.memories == []
    assert rows.fill(odd) == [False] * 5
    (rows,) = rows_like([torch.ones(2, 2)], [CPU])
    for other in (odd[0], torch.ones(4), Special(torch.ones(2, 2))):
        assert rows.fill([other]) == [False]
