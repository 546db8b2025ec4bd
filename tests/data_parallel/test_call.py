"""Tests of a call on several devices: one node of the caller's graph, with the gradients of one device."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowdp.data_parallel.replicas import Replicas
from flowdp.device.streams import StreamLane
from tests.fakes import FakeCuda
from tests.loops import CPU, assert_equal, called, gradients, mlp, numbers, replicas_of
from tests.wired import wired


class World:
    """A model on several devices, and its copy on one."""

    def __init__(self, replicas: Replicas, sizes: tuple[int, ...] = (3, 2)) -> None:
        self.replicas = replicas
        self.module: Any = replicas.module
        self.twin: Any = copy.deepcopy(self.module)
        self.sizes = sizes

    def __call__(self, *args: Any, sizes: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        return called(self.replicas, sizes or self.sizes, *args, **kwargs)

    def check(self) -> None:
        """Assert that the gradients are those of the copy."""
        assert_equal(gradients(self.module), gradients(self.twin))


@pytest.fixture(params=["3", "2 on streams", "2 on nccl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    count, _, on = request.param.partition(" on ")
    lanes = on == "streams" and [StreamLane(CPU, FakeCuda()) for _ in range(int(count))]
    with (
        wired(mlp(), int(count)) if on == "nccl" else replicas_of(mlp(), int(count), lanes=lanes or None)
    ) as replicas:
        yield World(replicas, (3, 1, 1) if count == "3" else (3, 2))


def loss_of(out: Tensor) -> Tensor:
    return (out.sin() * torch.arange(out.numel()).reshape(out.shape)).mean()


# ---------------------------------------------------------------- gradients
def test_outputs_and_gradients_are_those_of_one_device(world: World) -> None:
    x = numbers(5, 6)
    for call in (world, world.twin):
        loss_of(call(x)).backward()
    assert torch.allclose(world(x), world.twin(x))
    world.check()


def test_a_call_under_an_activation_checkpoint() -> None:
    """On a card the first rank works in the caller's thread, which has the hooks on saved tensors."""
    cuda = FakeCuda()
    with replicas_of(mlp(), lanes=[StreamLane(CPU, cuda) for _ in range(2)]) as replicas:
        world = World(replicas)
        for is_reentrant in (False, True):
            for call in (world, world.twin):
                x = numbers(5, 6).requires_grad_()
                loss_of(checkpoint(call, x, use_reentrant=is_reentrant)).backward()
        world.check()


# ---------------------------------------------------------------- ways to call autograd


def test_a_graph_ends_with_its_output(world: World) -> None:
    class Mark(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            alive.add(hidden)
            out: Tensor = hidden.sin()
            alive.add(out)
            return out

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    with replicas_of(Mark(), len(world.sizes)) as replicas:
        marked = World(replicas, world.sizes)
        out = marked(numbers(5, 6))
        assert len(alive) == 2 * len(world.sizes)
        out.sum().backward()
        gc.collect()
        assert len(alive) == 0, "backward frees the graphs of the devices"
        out = marked(numbers(5, 6))
        del out
        gc.collect()
        assert len(alive) == 0


def test_a_loss_that_is_kept_keeps_no_batch(world: World) -> None:
    batch = numbers(5, 6)
    alive = weakref.ref(batch)
    loss = world(batch).sum()
    del batch
    gc.collect()
    assert alive() is not None, "or the test shows nothing"
    loss.backward()
    gc.collect()
    assert alive() is None
    assert loss.requires_grad


class Backwards(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.function()
        return gradient, None


class Noting(nn.Module):
    """Calls a function of the caller's in forward and backward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x: Tensor) -> Tensor:
        self.function()
        out: Tensor = Backwards.apply(self.inner(x), self.function)
        return out


def test_ranks_walk_their_graphs_in_their_own_threads(world: World) -> None:
    """Autograd's thread of a device may be the one that waits for them."""
    seen: list[tuple[str, bool]] = []

    def note() -> None:
        seen.append((threading.current_thread().name, torch._C._is_multithreading_enabled()))

    count = len(world.sizes)
    with replicas_of(Noting(note), count) as replicas:
        loss_of(called(replicas, world.sizes, numbers(5, 6))).backward()
    assert sorted(seen) == [(f"flowdp-replica-{rank}", False) for rank in range(count) for _ in "fb"]


# ---------------------------------------------------------------- errors
class Backfire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error
        return gradient, None


class Fragile(nn.Module):
    """Fails in the backward of its first layer for a sample of the largest size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        error = KeyError("backward") if x.max() > 100 else None
        out: Tensor = self.last(Backfire.apply(self.first(x), error))
        return out


@pytest.mark.parametrize("rank", [0, 1])
def test_after_an_error_in_backward_nothing_of_it_is_left(rank: int) -> None:
    with replicas_of(Fragile()) as replicas:
        world = World(replicas)
        x = numbers(5, 6)
        bad = x.clone()
        bad[4 * rank] = 1e3
        with pytest.raises(KeyError, match="backward") as caught:
            loss_of(world(bad)).backward()
        assert caught.value.__notes__ == [f"flowdp: on rank {rank}, cpu"]
        world.module.zero_grad()  # as `optimizer.zero_grad` does
        loss_of(world(x)).backward()
        loss_of(world.twin(x)).backward()
        world.check()
