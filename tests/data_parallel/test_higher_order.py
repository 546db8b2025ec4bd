"""Tests of gradients of gradients through a call: equal to one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.scatter import Arguments, CallArguments
from flowdp.data_parallel.sharded_call import call_sharded, collect_gradients, cut
from tests.loops import assert_equal, gradients, mlp, numbers, replicas_of

cycles = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


class World:
    """A model on several devices, and its copy on one."""

    def __init__(self, replicas: Replicas, sizes: tuple[int, ...]) -> None:
        self.replicas = replicas
        self.module: Any = replicas.modules[0]
        self.twin: Any = copy.deepcopy(self.module)
        self.sizes = sizes
        self.sync = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_sharded(self.replicas, cut(Arguments(args, kwargs), self.sizes), _run, sync=self.sync)

    def both(self, do: Callable[[Any, Any], Any]) -> list[Any]:
        """Results of `do(call, module)` on several devices and on one; asserts equal gradients, too."""
        found = [do(self, self.module), do(self.twin, self.twin)]
        assert_equal(gradients(self.module), gradients(self.twin))
        assert any(gradient is not None for gradient in gradients(self.twin)), "or the test shows nothing"
        return found


def _run(module: nn.Module, part: CallArguments) -> Any:
    return module(*part.args, **part.kwargs)


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with replicas_of(mlp(), request.param) as replicas:
        yield World(replicas, (3, 1, 1) if request.param == 3 else (3, 2))


def penalty(out: Tensor, x: Tensor) -> Tensor:
    """The gradient penalty of WGAN-GP."""
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return (slope.norm(2, dim=1) - 1).square().mean()


def test_a_penalty_on_the_gradient_of_the_input(world: World) -> None:
    def step(call: Any, _module: Any) -> None:
        x = numbers(5, 6).requires_grad_()
        penalty(call(x), x).backward()

    world.both(step)


def test_a_penalty_beside_the_loss_of_the_same_output(world: World) -> None:
    """The graphs of call and penalty share parts, and one backward runs through both."""

    def step(call: Any, _module: Any) -> None:
        x = numbers(5, 6).requires_grad_()
        out = call(x)
        (out.sin().sum() + penalty(out, x)).backward()
        (penalty(out2 := call(x), x) + out2.cos().sum()).backward()

    world.both(step)


def test_inputs_that_another_module_made_get_theirs(world: World) -> None:
    def step(call: Any, _module: Any) -> Tensor:
        z = numbers(5, 6, seed=8).requires_grad_()
        x = z.sin() * 2
        out = call(x)
        (slope,) = torch.autograd.grad((out * out.detach()).sum(), x, create_graph=True)
        (slope.square().sum() + out.sum()).backward()
        assert z.grad is not None
        return z.grad

    assert_equal(*([one] for one in world.both(step)))


def test_a_penalty_on_the_gradients_of_the_parameters(world: World) -> None:
    def step(call: Any, module: Any) -> None:
        loss = call(numbers(5, 6)).square().mean()
        slopes = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        (loss + sum(slope.square().sum() for slope in slopes)).backward()

    world.both(step)


@cycles
def test_backward_with_a_graph_of_its_gradients(world: World) -> None:
    def step(call: Any, module: Any) -> None:
        call(numbers(5, 6)).square().mean().backward(create_graph=True)
        total = sum(parameter.grad.square().sum() for parameter in module.parameters())
        slopes = torch.autograd.grad(total, list(module.parameters()))
        for parameter, slope in zip(module.parameters(), slopes, strict=True):
            parameter.grad = slope

    world.both(step)


def test_third_derivatives(world: World) -> None:
    def step(call: Any, module: Any) -> None:
        x = numbers(5, 6).requires_grad_()
        (one,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
        (two,) = torch.autograd.grad(one.square().sum(), x, create_graph=True)
        three = torch.autograd.grad(two.square().sum(), list(module.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in three[:2]).backward()  # type: ignore[union-attr]

    world.both(step)


def test_a_product_of_hessian_and_vector(world: World) -> None:
    def step(call: Any, module: Any) -> list[Tensor]:
        call(numbers(5, 6)).sum().backward()
        parameters = list(module.parameters())
        slopes = torch.autograd.grad(call(numbers(5, 6)).sin().sum(), parameters, create_graph=True)
        along = [torch.ones_like(parameter) for parameter in parameters]
        return list(torch.autograd.grad(slopes, parameters, along))

    assert_equal(*world.both(step))


def test_arguments_that_go_whole_and_losses_from_the_module() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.inner(x * scale).square().mean()

    with replicas_of(Loss()) as replicas:
        world = World(replicas, (3, 2))

        def step(call: Any, _module: Any) -> list[Tensor | None]:
            x, scale = numbers(5, 6).requires_grad_(), torch.full((6,), 2.0).double().requires_grad_()
            slopes = torch.autograd.grad(call(x, scale=scale).exp(), (x, scale), create_graph=True)
            sum(slope.square().sum() for slope in slopes).backward()  # type: ignore[union-attr]
            return [x.grad, scale.grad]

        assert_equal(*world.both(step))


@cycles
def test_beside_gradients_that_wait_at_the_replicas(world: World) -> None:
    def step(call: Any, _module: Any) -> None:
        world.sync = False
        call(numbers(5, 6, seed=1)).sum().backward()
        x = numbers(5, 6).requires_grad_()
        penalty(call(x), x).backward()
        world.sync = True
        out = call(x)
        (out.sum() + penalty(out, x)).backward(create_graph=True)
        if call is world:
            assert not any(map(world.replicas.has_unsummed, range(len(world.sizes))))

    world.both(step)


def test_gradients_that_are_only_asked_for_leave_those_that_wait_alone(world: World) -> None:
    def step(call: Any, module: Any) -> list[Tensor]:
        x = numbers(5, 6).requires_grad_()
        world.sync = False
        call(x).sum().backward()
        asked = [x, *module.parameters()]
        found = torch.autograd.grad(call(x).sin().sum(), asked)
        world.sync = True
        torch.autograd.grad(call(x).sum(), x)
        if call is world:
            collect_gradients(world.replicas)
        return list(found)

    assert_equal(*world.both(step))


def test_a_graph_that_is_freed_is_said_to_be(world: World) -> None:
    x = numbers(5, 6).requires_grad_()
    for call in (world, world.twin):
        loss = penalty(call(x), x)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        loss = penalty(call(x), x)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal(gradients(world.module), gradients(world.twin))


def test_hooks_see_each_gradient_once(world: World) -> None:
    seen: dict[Any, list[Tensor]] = {world.module: [], world.twin: []}

    def step(call: Any, module: Any) -> None:
        handle = module[0].weight.register_hook(lambda gradient: seen[module].append(gradient.detach()))
        x = numbers(5, 6).requires_grad_()
        penalty(call(x), x).backward()
        handle.remove()

    world.both(step)
    assert len(seen[world.twin]) == 1
    assert_equal(seen[world.module], seen[world.twin])
