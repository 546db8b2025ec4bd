"""Loops as people write them: hooks, modes that look into the caller's thread, and tracers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tests.data_parallel.pairs import Shares, Side, check, draw, everywhere, mlp, square, train

Seen = list[Any]
Register = Callable[[nn.Module, Seen], Any]


# ---------------------------------------------------------------- hooks of modules
def outputs_appended(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_forward_hook(lambda _, args, out: seen.append(out))


def outputs_scaled(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("0").register_forward_hook(lambda _, args, out: out * 2)


def outputs_scaled_by_all(model: nn.Module, seen: Seen) -> Any:
    """A result that looks across the batch."""
    return model.get_submodule("0").register_forward_hook(
        lambda _, args, out: out / (1 + out.square().mean())
    )


def output_of_the_model(model: nn.Module, seen: Seen) -> Any:
    return model.register_forward_hook(lambda _, args, out: seen.append(out.detach()))


def slopes_scaled(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_full_backward_hook(lambda _, into, of: (into[0] * 3,))


def slopes_normalised(model: nn.Module, seen: Seen) -> Any:
    """A result that looks across the batch."""
    return model.get_submodule("1").register_full_backward_hook(
        lambda _, into, of: (into[0] / into[0].norm(),)
    )


HOOKS: list[Register] = [
    outputs_appended,
    outputs_scaled,
    outputs_scaled_by_all,
    output_of_the_model,
    slopes_scaled,
    slopes_normalised,
]


@pytest.mark.parametrize("when", ["before setup", "behind the first calls"])
@pytest.mark.parametrize("register", HOOKS)
@everywhere
def test_hooks(register: Register, when: str, shares: Shares) -> None:
    """Hooks see and change what they would on one device, once, and nothing when they are removed."""
    made: dict[nn.Module, tuple[Seen, list[Any]]] = {}

    def make() -> nn.Module:
        model = mlp()
        seen: Seen = []
        made[model] = seen, [register(model, seen)] if when == "before setup" else []
        return model

    def loop(side: Side) -> Any:
        seen, handles = made[side.module]
        outputs = train(side, 3)
        if when != "before setup":
            handles.append(register(side.module, seen))
        outputs += train(side, 3)
        (square(side.model(draw())) + side.model(draw(5, seed=1)).abs().mean()).backward()
        side.step()
        with torch.no_grad():
            outputs.append(side.model(draw(3)))
        count = len(seen)
        for handle in handles:
            handle.remove()
        outputs += train(side, 3)
        assert len(seen) == count
        return outputs, seen

    check(loop, shares, make)


@pytest.mark.parametrize("when", ["before setup", "behind the first calls"])
@everywhere
def test_features_of_a_hook_in_the_loss(when: str, shares: Shares) -> None:
    made: dict[nn.Module, dict[str, Tensor]] = {}

    def hook(model: nn.Module, found: dict[str, Tensor]) -> None:
        model.get_submodule("1").register_forward_hook(lambda _, args, out: found.__setitem__("hidden", out))

    def make() -> nn.Module:
        model = mlp()
        made[model] = {}
        if when == "before setup":
            hook(model, made[model])
        return model

    def loop(side: Side) -> list[Tensor]:
        found = made[side.module]
        seen = train(side, 3)
        if when != "before setup":
            hook(side.module, found)
        for step in range(4):
            y = side.model(draw(seed=step))
            (square(y) + 0.3 * found["hidden"].square().mean()).backward()
            seen.append(found["hidden"])
            side.step()
        return seen

    check(loop, shares, make)


# ---------------------------------------------------------------- hooks of tensors
@everywhere
def test_hooks_of_parameters_see_the_sum_once(shares: Shares) -> None:
    def loop(side: Side) -> Any:
        seen: Seen = []
        outputs = train(side, 3)
        first, *_, last = side.module.parameters()
        last.register_hook(lambda g: seen.append(g.clone()))
        last.register_post_accumulate_grad_hook(
            lambda p: seen.append(None if p.grad is None else p.grad.clone())
        )
        first.register_hook(lambda g: g * 3)
        outputs += train(side, 3)
        (square(side.model(draw())) + side.model(draw(5, seed=1)).abs().mean()).backward()
        side.step()
        return outputs, seen

    check(loop, shares, mlp)


@everywhere
def test_an_optimizer_in_the_backward(shares: Shares) -> None:
    """Each parameter steps when its gradient has come, and the gradient is dropped."""

    def loop(side: Side) -> list[Tensor]:
        def step(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.data.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for parameter in side.module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        seen = []
        for number in range(4):
            y = side.model(draw(seed=number))
            square(y).backward()
            seen.append(y)
        return seen

    check(loop, shares, mlp)


@everywhere
def test_hooks_of_outputs(shares: Shares) -> None:
    def loop(side: Side) -> Seen:
        seen: Seen = []

        def note(g: Tensor) -> None:
            seen.append(g.clone())

        for step in range(3):
            x = draw(seed=step).requires_grad_()
            y = side.model(x)
            y.register_hook(note)
            y.register_hook(lambda g: g * 2)
            x.register_hook(note)
            y.retain_grad()
            square(y).backward()
            seen += [y.grad, x.grad]
            side.step()
        return seen

    check(loop, shares, mlp)


# ---------------------------------------------------------------- modes of the caller's thread


class Functions(TorchFunctionMode):
    """Counts the calls of linear, and scales their results."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            self.count += 1
            return out * 2
        return out


@contextmanager
def counted_flops(seen: Seen) -> Iterator[None]:
    with FlopCounterMode(display=False) as counter:
        yield
    seen.append(counter.get_total_flops())


@contextmanager
def changed_functions(seen: Seen) -> Iterator[None]:
    with Functions() as functions:
        yield
    seen.append(functions.count)


@contextmanager
def counted_saved_tensors(seen: Seen) -> Iterator[None]:
    saved: Seen = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor * 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        yield
    seen.append(sum(saved))


@contextmanager
def saved_on_the_host(seen: Seen) -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu():
        yield


WATCHES = [
    counted_flops,
    changed_functions,
    counted_saved_tensors,
    saved_on_the_host,
]


@pytest.mark.parametrize("watch", WATCHES)
@everywhere
def test_modes_around_a_call(watch: Callable[[Seen], Any], shares: Shares) -> None:
    def loop(side: Side) -> Any:
        seen: Seen = []
        outputs = train(side, 3)
        for step in range(3):
            with watch(seen):
                y = side.model(draw(seed=step))
                loss = square(y)
            outputs.append(y)
            loss.backward()
            side.step()
        return outputs + train(side, 2), seen

    check(loop, shares, mlp)
