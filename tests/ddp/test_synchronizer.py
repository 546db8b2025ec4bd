from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowdp.collective.local_group import group_lanes, local_groups
from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.ddp.synchronizer import GradientSynchronizer
from flowdp.device.streams import StreamLane
from flowdp.errors import CollectiveError, OptionError
from tests.collective.fake_world import in_threads
from tests.fakes import FakeCuda
from tests.limits import HANG_S

WAYS = [("synchronous", True), ("overlapped", True), ("overlapped", False)]


BASE = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def model() -> nn.Sequential:
    return copy.deepcopy(BASE)


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def each(size: int, body: Callable[[ProcessGroup], Any]) -> list[Any]:
    groups = local_groups(["cpu"] * size, timeout=HANG_S)

    def run(rank: int) -> Any:
        try:
            return body(groups[rank])
        except Exception as error:
            groups[rank].abort(str(error))
            raise

    results = in_threads(range(size), run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def opened(
    module: nn.Module, group: ProcessGroup, way: tuple[Any, bool], bucket_bytes: int
) -> GradientSynchronizer:
    return GradientSynchronizer(
        module.parameters(),
        group,
        strategy=way[0],
        bucket_bytes=bucket_bytes,
        gradient_as_bucket_view=way[1],
    )


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def mean_of(size: int, loss: Callable[[nn.Sequential, int], Tensor]) -> list[Tensor | None]:
    """The mean of the ranks' gradients, in one thread and without flowdp."""
    modules = [model() for _ in range(size)]
    for rank, module in enumerate(modules):
        loss(module, rank).backward()
    means: list[Tensor | None] = []
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        there = [p.grad for p in parameters if p.grad is not None]
        means.append(sum(there) / size if there else None)
    return means


def assert_close(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-13, atol=1e-15)


Loss = Callable[[nn.Sequential, int], Tensor]
Act = Callable[[nn.Sequential, GradientSynchronizer, int], object]


def check_means(
    loss: Loss,
    act: Act | None = None,
    *,
    size: int = 2,
    way: tuple[Any, bool],
    bucket_bytes: int = 100,
    make: Callable[[], nn.Sequential] = model,
) -> list[Tensor | None]:
    """Check that what ranks do leaves the mean of their gradients of a loss at each; returns that mean."""

    def body(group: ProcessGroup) -> list[Tensor | None]:
        module = make()
        synchronizer = opened(module, group, way, bucket_bytes)
        if act is None:
            loss(module, group.rank).backward()
        else:
            act(module, synchronizer, group.rank)
        return gradients(module)

    wanted = mean_of(size, loss)
    for found in each(size, body):
        assert_close(found, wanted)
    return wanted


def squared(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = module(data(rank, step)).square().mean()
    return out


class Spy(ProcessGroup):
    """The group of a single rank, which records its calls."""

    backend = "single"

    def __init__(self, log: list[str]) -> None:
        self.rank, self.size, self.device = 0, 1, torch.device("cpu")
        self.log = log

    def all_reduce(self, tensor: Tensor, op: Any = "mean", *, async_op: bool = False) -> Work:
        self.log.append(f"start {tensor.numel()}")
        return Work(lambda: self.log.append(f"wait {tensor.numel()}"))

    all_gather_object = barrier = _reduce = _broadcast = _gather = None


# ---------------------------------------------------------------- the mean
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 200])
def test_gradients_are_means_when_backward_returns(way, bucket_bytes):
    def act(module: nn.Sequential, _: object, rank: int) -> None:
        for set_to_none in (True, False):  # an earlier pass leaves nothing behind
            squared(module, rank + 7).backward()
            module.zero_grad(set_to_none=set_to_none)
        squared(module, rank).backward()

    check_means(squared, act, size=3, way=way, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_missing_gradients(way):
    """Missing on one rank: zero. On every rank: None. The last rank to miss it must not wait forever."""

    def loss(module: nn.Sequential, rank: int) -> Tensor:
        hidden = module[1](module[0](data(rank)))
        if rank == 0:
            hidden = hidden + module[2](hidden)
        return hidden.square().mean()  # the last layer is unused

    def act(module: nn.Sequential, _: object, rank: int) -> None:
        loss(module, rank).backward()
        first = gradients(module)
        module.zero_grad(set_to_none=True)
        loss(module, rank).backward()
        assert_close(gradients(module), first)

    wanted = check_means(loss, act, way=way)
    assert wanted[-1] is None
    assert wanted[2] is not None


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_accumulation(way):
    """Backward passes that are not averaged, then one that is: the mean of the sums."""

    def act(module: nn.Sequential, synchronizer: GradientSynchronizer, rank: int) -> None:
        for set_to_none in (True, False, True):
            module.zero_grad(set_to_none=set_to_none)
            synchronizer.automatic = False
            for step in range(2):
                squared(module, rank, step).backward()
            alone = gradients(module)
            synchronizer.automatic = True
            squared(module, rank, 2).backward()
        assert not torch.equal(alone[0], gradients(module)[0])

    check_means(lambda module, rank: sum(squared(module, rank, step) for step in range(3)), act, way=way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_means_may_be_added_to_and_averaged_again(way):
    def act(module: nn.Sequential, synchronizer: GradientSynchronizer, rank: int) -> None:
        for step in range(2):
            squared(module, rank, step).backward()
        synchronizer.sync_all()

    check_means(lambda module, rank: sum(squared(module, rank, step) for step in range(2)), act, way=way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_parameter_used_twice_and_checkpoints(way, use_reentrant):
    def loss(module: nn.Sequential, rank: int) -> Tensor:
        x = data(rank).requires_grad_()
        hidden = checkpoint(module[:2], x, use_reentrant=use_reentrant)
        hidden = checkpoint(lambda x: module[2](module[2](x)), hidden, use_reentrant=use_reentrant)
        return module[4](module[3](hidden)).square().mean()

    def act(module: nn.Sequential, _: object, rank: int) -> None:
        for _ in range(2):
            module.zero_grad()
            loss(module, rank).backward()

    check_means(loss, act, way=way, bucket_bytes=1)


def test_channels_last_and_narrow_gradients():
    def body(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        narrow = nn.Linear(4, 4).to(torch.bfloat16)
        synchronizer = GradientSynchronizer(
            [*convolution.named_parameters(), *narrow.named_parameters()], group, strategy="overlapped"
        )
        image = torch.full((1, 3, 5, 5), group.rank + 1.0).to(memory_format=torch.channels_last)
        out = convolution(image).mean() + narrow(image.flatten()[:4].to(torch.bfloat16)).sum()
        out.backward()
        del synchronizer
        assert convolution.weight.grad is not None
        assert convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)
        return convolution.weight.grad.unique(), narrow.weight.grad.unique()

    for wide, narrow in each(2, body):
        assert torch.allclose(wide, torch.tensor(1.5 / 4))
        assert narrow.tolist() == [1.5]


@pytest.mark.parametrize("is_view", [True, False])
def test_on_streams(is_view):
    """On fake CUDA streams only these events order a rank's work with the averaging."""
    cuda = FakeCuda()
    lanes = [StreamLane(torch.device("cpu"), cuda) for _ in range(2)]
    groups = group_lanes(lanes, timeout=HANG_S)

    def body(rank: int) -> None:
        with lanes[rank].on(lanes[rank].compute), torch.autograd.set_multithreading_enabled(False):
            module = model()
            synchronizer = GradientSynchronizer(
                module.parameters(),
                groups[rank],
                strategy="overlapped",
                bucket_bytes=300,
                gradient_as_bucket_view=is_view,
            )
            cuda.watch(f"rank {rank}", *(bucket.data for bucket in synchronizer._buckets))
            for step in range(3):
                module.zero_grad(set_to_none=step != 1)
                module(data(rank, step)).square().mean().backward()
                for parameter in module.parameters():
                    parameter.data.sub_(parameter.grad)

    assert in_threads(range(2), body) == [None, None]
    assert not cuda.races


# ---------------------------------------------------------------- buckets
def sizes(synchronizer: GradientSynchronizer) -> list[list[int]]:
    return [[p.numel() for p in bucket.parameters] for bucket in synchronizer._buckets]


def test_layout():
    given = [nn.Parameter(torch.zeros(n)) for n in (2, 3, 100, 4, 5)]
    given.insert(2, nn.Parameter(torch.zeros(7), requires_grad=False))
    given.insert(3, nn.Parameter(torch.zeros(6, dtype=torch.float64)))
    group = ProcessGroup.single()
    assert sizes(GradientSynchronizer(given, group)) == [[5, 4, 100, 3, 2], [6]]
    assert sizes(GradientSynchronizer(given, group, bucket_bytes=36)) == [[5, 4], [100], [6], [3, 2]]
    assert sizes(GradientSynchronizer(given, group, bucket_bytes=1)) == [[5], [4], [100], [6], [3], [2]]
    assert sizes(GradientSynchronizer(given + given[:1], group)) == [[5, 4, 100, 3, 2], [6]]


def test_gradients_are_views_and_stay_where_they_are():
    module = model()
    synchronizer = GradientSynchronizer(module.parameters(), ProcessGroup.single(), strategy="overlapped")
    places = []
    for set_to_none in (True, False, True):
        module(data(0)).sum().backward()
        places.append([p.grad.data_ptr() for p in module.parameters()])
        module.zero_grad(set_to_none=set_to_none)
    assert places[0] == places[1] == places[2]
    memory = synchronizer._buckets[0].data
    inside = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    assert all(place in inside for place in places[0])


def test_overlapped_starts_buckets_in_order_while_backward_runs():
    log: list[str] = []
    module = model()
    synchronizer = GradientSynchronizer(module.parameters(), Spy(log), strategy="overlapped", bucket_bytes=1)
    assert sizes(synchronizer) == [[2], [12], [6], [36], [6], [24]]
    module[2].weight.register_hook(lambda grad: log.append("middle"))
    module[0].weight.register_hook(lambda grad: log.append("first"))
    module(data(0)).sum().backward()
    order = [line for line in log if line in ("start 13", "middle", "start 37", "first", "start 25")]
    assert order == ["start 13", "middle", "start 37", "first", "start 25"]
    counts = (3, 13, 7, 37, 7, 25)
    assert [line for line in log if line.startswith("start")] == [f"start {n}" for n in counts]
    assert log[-6:] == [f"wait {n}" for n in counts]


def test_a_bucket_waits_for_those_before_it():
    log: list[str] = []
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    synchronizer = GradientSynchronizer([first, second], Spy(log), strategy="overlapped", bucket_bytes=1)
    first.sum().backward()  # its bucket is the second one
    assert log == ["start 6", "start 4", "wait 6", "wait 4"]
    assert second.grad is None
    log.clear()
    second.register_hook(lambda grad: log.append("second"))
    (second.exp().sum() * first.exp().sum()).backward()
    assert log == ["second", "start 6", "start 4", "wait 6", "wait 4"]
    del synchronizer


def test_synchronous_starts_after_backward():
    log: list[str] = []
    module = model()
    synchronizer = GradientSynchronizer(module.parameters(), Spy(log), bucket_bytes=1)
    module[0].weight.register_hook(lambda grad: log.append("first"))
    module(data(0)).sum().backward()
    assert log[0] == "first"
    assert len(log) == 1 + 2 * len(synchronizer._buckets)


# ---------------------------------------------------------------- manual calls
@pytest.mark.parametrize("strategy", ["synchronous", "overlapped"])
def test_by_hand(strategy):
    log: list[str] = []
    module = model()
    synchronizer = GradientSynchronizer(
        module.parameters(), Spy(log), strategy=strategy, bucket_bytes=1, automatic=False
    )
    module(data(0)).sum().backward()
    assert log == []
    for parameter in reversed(list(module.parameters())[2:]):
        synchronizer.add_gradient(parameter)
    assert len(log) == (4 if strategy == "overlapped" else 0)
    synchronizer.sync_all()
    assert len(log) == 12
    log.clear()
    synchronizer.add_gradient(list(module.parameters())[-1])
    synchronizer.clear()
    assert log == (["start 3", "wait 3"] if strategy == "overlapped" else [])


def test_a_gradient_that_comes_again_while_it_is_averaged():
    module = model()
    synchronizer = GradientSynchronizer(
        module.named_parameters(), Spy([]), strategy="overlapped", bucket_bytes=1, automatic=False
    )
    module(data(0)).sum().backward()
    synchronizer.add_gradient(module[4].bias)
    with pytest.raises(CollectiveError, match=r"'4\.bias' got another gradient while"):
        synchronizer.add_gradient(module[4].bias)


def test_bad_gradients():
    embedding = nn.Embedding(4, 3, sparse=True)
    synchronizer = GradientSynchronizer(embedding.named_parameters(), ProcessGroup.single())
    with pytest.raises(OptionError, match="no gradient"):
        synchronizer.add_gradient(embedding.weight)
    with pytest.raises(OptionError, match="was not given to this synchronizer"):
        synchronizer.add_gradient(nn.Parameter(torch.zeros(1)))
    for _ in range(2):  # the second pass is one of its own
        with pytest.raises(OptionError, match=r"'weight' is sparse.*sparse=False"):
            embedding(torch.tensor([1])).sum().backward()


# ---------------------------------------------------------------- changes and failures


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_unfrozen_when_all_were_frozen(way):
    """And between forward and backward: the hooks exist."""

    def act(module: nn.Sequential, synchronizer: GradientSynchronizer, rank: int) -> None:
        assert not any(parameter.requires_grad for parameter in module.parameters())
        module.requires_grad_(True)
        first = squared(module, rank)
        module.requires_grad_(False)
        synchronizer.prepare()
        module.requires_grad_(True)
        first.backward()

    check_means(squared, act, way=way, make=lambda: model().requires_grad_(False))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_frozen_between_forward_and_backward(way):
    """Torch calls the hook of a parameter that it then leaves unchanged."""

    def loss(module: nn.Sequential, rank: int) -> Tensor:
        out = squared(module, rank)
        module[4].requires_grad_(False)
        return out

    assert check_means(loss, way=way, bucket_bytes=1)[4] is None


def test_parameters_that_cannot_learn_are_left_alone():
    with torch.inference_mode():
        inference = nn.Parameter(torch.ones(2), requires_grad=False)
    integers = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    synchronizer = GradientSynchronizer([inference, integers], ProcessGroup.single())
    assert sizes(synchronizer) == []


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def fail(module: nn.Sequential) -> ValueError:
    """A backward pass that fails after the last layer got its gradients; the error is kept, as users may."""
    with pytest.raises(ValueError, match="today") as caught:
        module[4](Fails.apply(module[:4](data(0)))).sum().backward()
    return caught.value


@pytest.mark.parametrize("strategy", ["synchronous", "overlapped"])
def test_after_a_backward_pass_that_failed_the_next_one_is_averaged(strategy):
    log: list[str] = []
    module = model()
    synchronizer = GradientSynchronizer(module.parameters(), Spy(log), strategy=strategy)
    kept = fail(module)
    assert log == []
    module(data(0)).sum().backward()
    assert len(log) == 2
    del synchronizer, kept


def test_hooks_go_with_the_synchronizer():
    log: list[str] = []
    module = model()
    synchronizer = GradientSynchronizer(module.parameters(), Spy(log))
    del synchronizer
    gc.collect()
    module(data(0)).sum().backward()
    assert log == []
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_a_parameter_shared_by_reentrant_checkpoints():
    """Each is its own backward pass, and the parameter gets a gradient in both."""

    def backward(strategy: Any) -> None:
        module = model()
        synchronizer = GradientSynchronizer(
            module.parameters(), ProcessGroup.single(), strategy=strategy, bucket_bytes=1
        )
        hidden = module[0](data(0))
        for _ in range(2):
            hidden = checkpoint(module[2], hidden, use_reentrant=True)
        module[4](hidden).sum().backward()
        del synchronizer

    backward("synchronous")
    with pytest.raises(CollectiveError, match="use_reentrant=False"):
        backward("overlapped")
