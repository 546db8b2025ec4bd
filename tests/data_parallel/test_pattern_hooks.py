"""Loops as people write them: hooks, modes that look into the caller's thread, and tracers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.data_parallel.pairs import Shares, Side, check, draw, everywhere, mlp, square, train

Seen = list[Any]
Register = Callable[[nn.Module, Seen], Any]


# ---------------------------------------------------------------- hooks of modules
def outputs_appended(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_forward_hook(lambda _, args, out: seen.append(out))


def inputs_appended(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("2").register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))


def outputs_counted(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_forward_hook(lambda _, args, out: seen.append(out.sum().item()))


def lengths_counted(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_forward_hook(lambda _, args, out: seen.append(len(out)))


def outputs_scaled(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("0").register_forward_hook(lambda _, args, out: out * 2)


def inputs_scaled(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("0").register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def outputs_scaled_by_all(model: nn.Module, seen: Seen) -> Any:
    """A result that looks across the batch."""
    return model.get_submodule("0").register_forward_hook(
        lambda _, args, out: out / (1 + out.square().mean())
    )


def output_of_the_model(model: nn.Module, seen: Seen) -> Any:
    return model.register_forward_hook(lambda _, args, out: seen.append(out.detach()))


def with_keywords(model: nn.Module, seen: Seen) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        seen.append((len(args), len(kwargs), out.detach()))

    return model.get_submodule("1").register_forward_hook(hook, with_kwargs=True)


def slopes_appended(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_full_backward_hook(lambda _, into, of: seen.append((*into, *of)))


def slopes_scaled(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("1").register_full_backward_hook(lambda _, into, of: (into[0] * 3,))


def slopes_normalised(model: nn.Module, seen: Seen) -> Any:
    """A result that looks across the batch."""
    return model.get_submodule("1").register_full_backward_hook(
        lambda _, into, of: (into[0] / into[0].norm(),)
    )


def slopes_before(model: nn.Module, seen: Seen) -> Any:
    return model.get_submodule("2").register_full_backward_pre_hook(lambda _, of: (of[0] * 0.5,))


HOOKS: list[Register] = [
    outputs_appended,
    inputs_appended,
    outputs_counted,
    lengths_counted,
    outputs_scaled,
    inputs_scaled,
    outputs_scaled_by_all,
    output_of_the_model,
    with_keywords,
    slopes_appended,
    slopes_scaled,
    slopes_normalised,
    slopes_before,
]


@pytest.mark.parametrize("when", ["before setup", "behind setup", "behind the first calls"])
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
        outputs = train(side, 0 if when == "behind setup" else 3)
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
@pytest.mark.parametrize("when", ["at the start", "behind the first calls"])
@everywhere
def test_hooks_of_parameters_see_the_sum_once(when: str, shares: Shares) -> None:
    def loop(side: Side) -> Any:
        seen: Seen = []
        outputs = train(side, 0 if when == "at the start" else 3)
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
class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] = self.seen.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


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
def counted_products(seen: Seen) -> Iterator[None]:
    """Products of matrices alone: what a loop adds around them may differ."""
    with Operations() as operations:
        yield
    seen.append({name: n for name, n in operations.seen.items() if "mm" in name or "tanh" in name})


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


@contextmanager
def one_thread_of_autograd(seen: Seen) -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(False):
        yield


WATCHES = [
    counted_flops,
    counted_products,
    changed_functions,
    counted_saved_tensors,
    saved_on_the_host,
    one_thread_of_autograd,
]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("watch", WATCHES)
@everywhere
def test_modes_around_a_call(watch: Callable[[Seen], Any], is_first: bool, shares: Shares) -> None:
    def loop(side: Side) -> Any:
        seen: Seen = []
        outputs = train(side, 0 if is_first else 3)
        for step in range(3):
            with watch(seen):
                y = side.model(draw(seed=step))
                loss = square(y)
            outputs.append(y)
            loss.backward()
            side.step()
        return outputs + train(side, 2), seen

    check(loop, shares, mlp)


class Making(nn.Module):
    """A forward that makes a tensor on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.ones(3)


@everywhere
def test_the_default_device_of_the_caller(shares: Shares) -> None:
    def loop(side: Side) -> list[Tensor]:
        seen, x = train(side, 2), draw()
        with torch.device("cpu"):
            seen += train(side, 2)
        with torch.device("meta"), pytest.raises(RuntimeError):
            side.model(x)
        return seen + train(side, 2)

    check(loop, shares, Making)


# ---------------------------------------------------------------- tracers
