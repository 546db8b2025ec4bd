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

from flowdp.data_parallel.call import call_parts
from flowdp.data_parallel.cut import Arguments
from flowdp.data_parallel.layout import PLAIN, Callee
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


@pytest.fixture(params=["2", "3", "2 on streams", "2 on nccl", "3 on nccl"])
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


def test_a_call_on_the_outputs_of_another() -> None:
    with replicas_of(nn.Linear(4, 4).double()) as replicas:
        world = World(replicas)
        for call in (world, world.twin):
            loss_of(call(call(numbers(5, 4)).tanh())).backward()
        world.check()


def test_inputs_that_ask_for_gradients_get_them_cut_or_whole(world: World) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            out: Tensor = self.inner(x * scale)
            return out

    found = []
    with replicas_of(Scaled(), len(world.sizes)) as replicas:
        scaled = World(replicas, world.sizes)
        for call in (scaled, scaled.twin):
            x, scale = numbers(5, 6).requires_grad_(), torch.full((6,), 2.0).double().requires_grad_()
            loss_of(call(x * 1.5, scale=scale)).backward()
            found.append([x.grad, scale.grad])
        scaled.check()
    assert_equal(*found)


def test_inputs_get_gradients_from_a_frozen_model(world: World) -> None:
    world.module.requires_grad_(False)
    found = []
    for call in (world, world.twin):
        x = numbers(5, 6).requires_grad_()
        loss_of(call(x)).backward()
        found.append([x.grad])
    assert_equal(*found)
    assert not any(gradients(world.module))


def test_parts_are_frozen_and_freed_on_the_way(world: World) -> None:
    x = numbers(5, 6)
    for frozen in (True, False):
        for call, module in ((world, world.module), (world.twin, world.twin)):
            module[0].requires_grad_(not frozen)
            loss_of(call(x)).backward()
        world.check()


def test_a_parameter_that_has_no_part_has_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out + self.idle(x) if x.sum() > 1e3 else out

    with replicas_of(Partly()) as replicas:
        world = World(replicas)
        x = numbers(5, 6)
        loss_of(world(x)).backward()
        assert world.module.idle.weight.grad is None
        x[4] += 1e3  # only on the second device
        world.module.zero_grad()
        out = world(x)
        (out[:3].sum() + out[3:].sin().sum()).backward()
        world.twin.used(x)[:3].sum().backward()
        (world.twin.used(x[3:]) + world.twin.idle(x[3:])).sin().sum().backward()
        world.check()


def test_outputs_of_all_kinds_take_their_gradients_back(world: World) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Any:
            out = self.inner(x)
            return {
                "twice": out.repeat_interleave(2, 0),
                "mean": out.square().mean(),
                "ids": out.argmax(1),
                "none": None,
                "unused": out * 3,
                "alone": out.detach(),
            }

    with replicas_of(Several(), len(world.sizes)) as replicas:
        several = World(replicas, world.sizes)
        for call in (several, several.twin):
            out = call(numbers(5, 6))
            assert not out["ids"].requires_grad
            assert not out["alone"].requires_grad
            (loss_of(out["twice"]) + 2 * out["mean"]).backward()
        several.check()


def test_sparse_gradients() -> None:
    with replicas_of(nn.EmbeddingBag(9, 3, sparse=True).double()) as replicas:
        world = World(replicas)
        ids = torch.tensor([[0, 1], [2, 2], [3, 0], [0, 8], [5, 5]])
        for call in (world, world.twin):
            loss_of(call(ids)).backward()
        (mine,), (other,) = gradients(world.module), gradients(world.twin)
        assert mine is not None
        assert other is not None
        assert mine.is_sparse
        assert_equal([mine.to_dense()], [other.to_dense()])


def test_outputs_may_be_changed_in_place(world: World) -> None:
    for call in (world, world.twin):
        out = call(numbers(5, 6))
        loss_of(out.mul_(2).relu_()).backward()
    world.check()
    for call in (world, world.twin):  # one sample, one device: the output is not joined
        out = call(numbers(1, 6), **({"sizes": (1, 0, 0)[: len(world.sizes)]} if call is world else {}))
        loss_of(out.mul_(2).relu_()).backward()
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


# ---------------------------------------------------------------- modules that write to their arguments


# ---------------------------------------------------------------- ways to call autograd
def test_a_graph_is_kept_and_walked_again(world: World) -> None:
    for call in (world, world.twin):
        loss = loss_of(call(numbers(5, 6)))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    world.check()


def test_a_freed_graph_says_so_where_only_its_own_part_is_free(world: World) -> None:
    out = world(numbers(5, 6))
    out.sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        (out * 2).sum().backward()


def test_gradients_that_are_asked_for_are_not_accumulated(world: World) -> None:
    mine = torch.autograd.grad(loss_of(world(numbers(5, 6))), list(world.module.parameters()))
    other = torch.autograd.grad(loss_of(world.twin(numbers(5, 6))), list(world.twin.parameters()))
    assert_equal(mine, other)
    world.twin.zero_grad()
    world.check()


def test_hooks_see_the_sum_once(world: World) -> None:
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for number, (call, module) in enumerate(((world, world.module), (world.twin, world.twin))):
        module[0].weight.register_hook(lambda g, n=number: (seen[n].append(g), g * 2)[1])
        module[2].bias.register_post_accumulate_grad_hook(lambda p, n=number: seen[n].append(p.grad.clone()))
        loss_of(call(numbers(5, 6))).backward()
    assert [len(found) for found in seen.values()] == [2, 2]
    assert_equal(*(sorted(found, key=len) for found in seen.values()))
    world.check()
    assert len(world.module[0].weight._backward_hooks) == 1


def test_modes_of_the_caller(world: World) -> None:
    x = numbers(5, 6)
    with torch.no_grad():
        assert not world(x).requires_grad
    with torch.inference_mode():
        assert world(x).is_inference()
    loss_of(world(x)).backward()
    loss_of(world.twin(x)).backward()
    world.check()


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


# ---------------------------------------------------------------- gradients of gradients


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_of_parameters(world: World) -> None:
    for call, module in ((world, world.module), (world.twin, world.twin)):
        own = list(module.parameters())
        slopes = torch.autograd.grad(loss_of(call(numbers(5, 6))), own, create_graph=True)
        more = torch.autograd.grad(
            torch.stack([one.square().sum() for one in slopes]).sum(), own[:2], create_graph=True
        )
        torch.stack([one.square().sum() for one in more]).sum().backward()
    world.check()


# ---------------------------------------------------------------- other tensors in the module's place
def test_weights_of_the_callers_own_get_the_gradients(world: World) -> None:
    found = []
    for call, module in ((world, world.module), (world.twin, world.twin)):
        loss_of(call(numbers(5, 6))).backward()  # from then on CPU devices share the parameters
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in module.named_parameters()}
        with torch.nn.utils.stateless._reparametrize_module(module, weights):
            loss_of(call(numbers(5, 6))).backward()
        found.append([weight.grad for weight in weights.values()])
    assert_equal(*found)
    loss_of(world(numbers(5, 6))).backward()
    loss_of(world.twin(numbers(5, 6))).backward()
    world.check()


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


class Saved(nn.Module):
    """Keeps a tensor of its forward in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.aux = out.square().mean()
        return out


def run(module: nn.Module, part: Any) -> Any:
    return module(*part.args, **part.kwargs)


def test_a_backward_through_an_attribute_that_forward_has_set() -> None:
    module = Saved()
    with replicas_of(module) as replicas:
        arguments = Arguments(PLAIN, Callee(module.forward), (numbers(4, 6),), {})
        first, _ = call_parts(replicas, arguments.parts((2, 2)), run)
        assert module.aux is not None
        first.sum().backward()  # the call's own is right
        with pytest.raises(RuntimeError, match="a second time"):
            (module.aux * 2).backward()
