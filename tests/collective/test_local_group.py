from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.collective import local_group
from flowdp.collective import mean as mean_module
from flowdp.collective.local_group import group_lanes, local_groups
from flowdp.collective.process_group import ProcessGroup
from flowdp.device.streams import StreamLane
from flowdp.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, OptionError
from tests.collective.fake_world import in_threads
from tests.fakes import FakeCuda
from tests.limits import HANG_S

CPU = torch.device("cpu")


@pytest.fixture(params=["one part", "many parts"], autouse=True)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "many parts":
        monkeypatch.setattr(mean_module, "BLOCK", 3)
    return request.param


def groups_of(size: int, timeout: float = HANG_S) -> list[ProcessGroup]:
    return local_groups(["cpu"] * size, timeout=timeout)


def each(groups: Sequence[ProcessGroup], body: Callable[[ProcessGroup], Any]) -> list[Any]:
    return in_threads(range(len(groups)), lambda rank: body(groups[rank]))


def values(rank: int, size: int = 101, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("size", "op", "dtype"),
    [
        (1, "sum", torch.float32),
        (2, "mean", torch.bfloat16),
        (3, "max", torch.float64),
        (4, "sum", torch.float32),
    ],
)
def test_all_reduce(size, op, dtype):
    def body(group: ProcessGroup) -> Tensor:
        tensor = values(group.rank, dtype=dtype)
        group.all_reduce(tensor, op)
        return tensor

    results = each(groups_of(size), body)
    stack = torch.stack([values(rank, dtype=dtype) for rank in range(size)]).double()
    wanted = {"sum": stack.sum(0), "mean": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[op]
    assert torch.allclose(results[0].double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert all(torch.equal(result, results[0]) for result in results)


def test_bits_do_not_depend_on_who_comes_last():
    def body(group: ProcessGroup, order: Sequence[int], turns: Sequence[threading.Event]) -> Tensor:
        tensor = values(group.rank, 5000)
        turns[order.index(group.rank)].wait(HANG_S)
        work = group.all_reduce(tensor, "sum", async_op=True)
        turns[order.index(group.rank) + 1].set()
        work.wait()
        return tensor

    seen = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        turns = [threading.Event() for _ in range(4)]
        turns[0].set()
        seen += each(groups_of(3), lambda group, o=order, t=turns: body(group, o, t))
    assert all(torch.equal(tensor, seen[0]) for tensor in seen)


def test_an_async_call_waits_for_nobody_and_keeps_its_order():
    groups = groups_of(2)
    mine, theirs = [[torch.full((50,), float(10 * at + r)) for at in range(4)] for r in (0, 1)]
    works = [groups[0].all_reduce(tensor, async_op=True) for tensor in mine]  # no other rank has called yet
    assert all(tensor[0] == 10 * at for at, tensor in enumerate(mine))

    def second() -> None:
        for tensor in theirs:
            groups[1].all_reduce(tensor, async_op=True)

    in_threads([1], lambda rank: second())
    for work in works:  # a rank that waits does the work, also for those that do not
        work.wait()
    for at in range(4):
        assert mine[at].tolist() == theirs[at].tolist() == [10 * at + 0.5] * 50


def test_broadcast_gather_objects_barrier():
    def body(group: ProcessGroup) -> Any:
        tensor = values(group.rank, 40).view(8, 5).t()  # not contiguous
        group.broadcast(tensor, 2)
        flags = torch.arange(40) % (group.rank + 2) == 0
        group.broadcast(flags, 1)
        gathered = group.all_gather(torch.full((2, 3), group.rank))
        group.barrier()
        return tensor, flags, gathered, group.all_gather_object(group.rank * "x")

    for tensor, flags, gathered, things in each(groups_of(3), body):
        assert torch.equal(tensor, values(2, 40).view(8, 5).t())
        assert torch.equal(flags, torch.arange(40) % 3 == 0)
        assert [part.tolist() for part in gathered] == [[[rank] * 3] * 2 for rank in range(3)]
        assert things == ["", "x", "xx"]


def test_what_autograd_knows_and_other_layouts():
    def body(group: ProcessGroup) -> Any:
        parameter = torch.nn.Parameter(torch.full((3,), float(group.rank)))
        group.all_reduce(parameter)
        image = torch.full((1, 2, 3, 3), float(group.rank)).to(memory_format=torch.channels_last)
        group.all_reduce(image)
        imaginary = torch.full((3,), 1j * group.rank)
        group.all_reduce(imaginary)
        empty = torch.empty(0)
        group.all_reduce(empty)
        return parameter.tolist(), image.unique().tolist(), imaginary.tolist()

    assert each(groups_of(2), body) == [([0.5] * 3, [0.5], [0.5j] * 3)] * 2


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda g: g.all_reduce(torch.zeros(4)), r"'mean' of torch.float32, shape \(4,\)"),
        (lambda g: g.all_reduce(torch.zeros(3).double()), "float64"),
        (lambda g: g.all_reduce(torch.zeros(3), "sum"), "'sum'"),
        (lambda g: g.broadcast(torch.zeros(3)), "broadcast from rank 0"),
        (lambda g: g.barrier(), "all_gather_object"),
    ],
)
@pytest.mark.parametrize("late", [0, 1])
def test_calls_that_differ_are_an_error_for_all(second, said, late):
    came = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank == late:
            assert came.wait(HANG_S)
        if group.rank == 1:
            second(group)
            return
        work = group.all_reduce(torch.zeros(3), async_op=True)
        came.set()
        work.wait()

    if late == 0:
        came.set()
    for error in each(groups_of(2), body):
        assert type(error) is CollectiveError
        assert "call 0 is" in str(error)
        assert "all_reduce 'mean' of torch.float32, shape (3,)" in str(error)
        assert any(part in str(error) for part in (said, said.replace("\\", "")))


def test_a_rank_that_does_not_come_is_named():
    groups = groups_of(3, timeout=0.05)
    works = [groups[rank].all_reduce(torch.zeros(3), async_op=True) for rank in (0, 2)]
    for work in works:
        with pytest.raises(CollectiveTimeout, match=r"rank 1 did not call all_reduce 'mean'.*0\.05 s"):
            work.wait()
    with pytest.raises(CollectiveTimeout, match="rank 1"):  # a late rank gets the error when it calls
        groups[1].all_reduce(torch.zeros(3))


def test_abort_releases_whoever_waits():
    groups = groups_of(2, timeout=1e6)
    is_under_way = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            work = group.all_reduce(torch.zeros(3), async_op=True)
            is_under_way.set()
            work.wait()
        else:
            assert is_under_way.wait(HANG_S)
            group.abort("no more data")
            group.abort("the first reason stays")
            group.barrier()

    for error in each(groups, body):
        assert type(error) is CollectiveAborted
        assert str(error) == "rank 1 gave up: no more data"


def test_a_rank_that_closes_is_not_waited_for():
    groups = groups_of(2, timeout=1e6)
    tensors = [torch.full((9,), float(rank)) for rank in (0, 1)]

    def body(group: ProcessGroup) -> None:
        work = group.all_reduce(tensors[group.rank], async_op=True)
        if group.rank == 1:
            group.close()
            return
        work.wait()  # it had called this one
        group.barrier()

    waiting, _ = each(groups, body)
    assert type(waiting) is CollectiveAborted
    assert str(waiting) == "rank 1 has closed its group and does not call all_gather_object"
    assert tensors[0].tolist() == [0.5] * 9


@pytest.mark.parametrize(
    ("devices", "timeout", "said"),
    [
        ([], 1, "at least one"),
        (["cpu", "cuda:0"], 1, "on cpu, cuda:0"),
        (["cpu"], 0, "timeout"),
    ],
)
def test_options(devices, timeout, said, monkeypatch):
    if "cuda:0" in devices:
        here = tuple(map(torch.device, devices))
        monkeypatch.setattr(local_group, "resolve_devices", lambda wanted: here)
    with pytest.raises(OptionError, match=said):
        local_groups(devices, timeout=timeout)


# ---------------------------------------------------------------- on streams
class Card:
    """Ranks on fake CUDA lanes; each makes, reduces and reads its tensor on its own stream."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        self.cuda = FakeCuda()
        self.lanes = [StreamLane(place, self.cuda) for place in places]
        self.groups = group_lanes(self.lanes, timeout=HANG_S)
        self.tensors = [torch.zeros(101) for _ in places]
        for rank, tensor in enumerate(self.tensors):
            self.cuda.watch(f"rank {rank}", tensor)

    def step(self, kind: str = "reduce") -> list[Any]:
        def body(rank: int) -> list[float]:
            tensor, lane, group = self.tensors[rank], self.lanes[rank], self.groups[rank]
            with lane.on(lane.compute):
                tensor.fill_(rank + 1.0)
                if kind == "reduce":
                    group.all_reduce(tensor, "mean", async_op=True).wait()
                elif kind == "broadcast":
                    group.broadcast(tensor, 1)
                else:
                    tensor.copy_(group.all_gather(tensor)[1])
                return tensor.mul(1.0).unique().tolist()

        return in_threads(range(len(self.lanes)), body)


PLACES = {"one card": [CPU] * 3, "two cards": [torch.device("cpu", 0)] + [torch.device("cpu", 1)] * 2}


@pytest.fixture(params=PLACES)
def card(request: pytest.FixtureRequest) -> Card:
    return Card(PLACES[request.param])


@pytest.mark.parametrize("kind", ["reduce", "broadcast", "gather"])
def test_streams_are_ordered(card, kind):
    for _ in range(3):
        assert card.step(kind) == [[2.0]] * 3
    assert card.cuda.races == []


def test_a_copy_between_cards_finds_the_comm_streams_of_both(card, monkeypatch):
    """Torch orders it with the current streams of both; the fake has only one card."""
    seen: list[set[str]] = []
    real = local_group.reduce_all

    def reduce_all(*args: Any) -> None:
        seen.append({stream.name for stream in card.cuda._local.stack})
        real(*args)

    monkeypatch.setattr(local_group, "reduce_all", reduce_all)
    card.step()
    comms = {lane.comm.name for lane in {lane.device: lane for lane in card.lanes[::-1]}.values()}
    assert all(comms <= names for names in seen)
    waits = [name for name, verb, _ in card.cuda.log if verb == "waits for" and name in comms]
    assert len(waits) == 3 * len(comms)


def test_what_cannot_be_enqueued_is_an_error_for_all(card, monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(local_group, "reduce_all", broken)
    errors = card.step()
    assert all("out of memory" in str(error) for error in errors), errors
    assert sum(isinstance(error, CollectiveAborted) for error in errors) == 2
