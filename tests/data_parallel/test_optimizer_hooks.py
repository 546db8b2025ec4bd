"""Tests of hooks on optimizers: all gradients are there before a step, and measured times are used after
it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from flowdp.data_parallel.balancer import SingleDevice
from flowdp.data_parallel.optimizer_hooks import OptimizerHooks
from flowdp.data_parallel.replicas import Replicas
from flowdp.errors import FlowdpError, OptionError
from tests.loops import assert_equal, mlp, numbers, replicas_of


class Steps(SingleDevice):
    """Counts steps."""

    def __init__(self, samples: tuple[int, ...] = (3, 1)) -> None:
        super().__init__()
        self.count, self.had = 0, samples

    @property
    def samples(self) -> tuple[int, ...]:
        return self.had

    def step(self) -> None:
        self.count += 1


def hooks_of(
    module: nn.Module, replicas: Replicas | None = None, **options: Any
) -> tuple[OptimizerHooks, Steps]:
    balancer = Steps()
    made = OptimizerHooks(module, replicas, balancer, **{"averages": False, **options})
    made.use(lambda parameters: SGD(parameters, 0.5))
    return made, balancer


def grad(module: nn.Module, value: float = 1.0) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    with replicas_of(mlp()) as replicas:
        yield replicas


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


# ---------------------------------------------------------------- steps
def test_what_replicas_hold_is_added_before_any_step(replicas: Replicas) -> None:
    module = replicas.modules[0]
    hooks, balancer = hooks_of(module, replicas)
    before = values(module)
    for step in (hooks.optimizers[0].step, lambda: hooks.step(None, None)):
        grad(module)
        grad(replicas.modules[1], 2.0)
        step()
        assert not replicas.has_unsummed(1)
    assert_equal(values(module), [value - 2 * 0.5 * 3 for value in before])
    assert (hooks.count, balancer.count) == (2, 2)


def test_the_first_optimizer_counts_and_each_sees_all_gradients(replicas: Replicas) -> None:
    module = replicas.modules[0]
    hooks, balancer = hooks_of(module, replicas)
    one, other = SGD(module[0].parameters(), 0.5), SGD(module[2].parameters(), 0.5)  # type: ignore[index]
    hooks.use([one, other])
    grad(module)
    grad(replicas.modules[1])
    before = values(module)
    other.step()
    assert (hooks.count, balancer.count) == (0, 0)
    one.step()
    assert (hooks.count, balancer.count) == (1, 1)
    assert_equal(values(module), [value - 1.0 for value in before])


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_would_unscale_some_alone_is_stopped(replicas: Replicas, is_enabled: bool) -> None:
    hooks, _ = hooks_of(replicas.modules[0], replicas)
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    for module in replicas.modules:
        scaler.scale(module(numbers(2, 6)).sum()).backward()
    if is_enabled:
        with pytest.raises(FlowdpError, match=r"no_sync\(\) has left.*dp.step\(scaler\)"):
            scaler.step(*hooks.optimizers)
        hooks.collect()
    scaler.step(*hooks.optimizers)
    assert hooks.count == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_steps_that_torch_does_not_count_are_sent(replicas: Replicas, is_first: bool) -> None:
    """Fused ones, for instance."""
    module = replicas.modules[0]
    first, second = (list(module[n].parameters()) for n in (0, 2))  # type: ignore[index]
    hooks, _ = hooks_of(module, replicas)
    optimizers = [AdamW(first, 0.1, fused=True), AdamW(second, 0.1, fused=True)]
    hooks.use(optimizers)

    def send() -> None:
        replicas.follow()
        replicas.each([None, partial(replicas.receive, 1)])

    send()
    grad(module)
    optimizers[not is_first].step()
    send()
    assert_equal(values(replicas.modules[1]), values(module))
    assert hooks.count == is_first


def test_optimizers_that_are_replaced_count_no_longer() -> None:
    hooks, balancer = hooks_of(mlp())
    (old,) = hooks.optimizers
    with pytest.raises(OptionError):
        hooks.use([])
    assert hooks.optimizers == (old,)
    new = AdamW(hooks._module.parameters())
    hooks.use(new)
    old.step()
    assert balancer.count == 0
    new.step()
    assert balancer.count == 1


def test_without_gradients_there_is_no_step() -> None:
    hooks, balancer = hooks_of(mlp())
    with pytest.raises(FlowdpError, match="no gradients: call backward"):
        hooks.step(None, None)
    assert balancer.count == 0


def test_buffers_are_averaged_at_the_step_where_that_is_wanted() -> None:
    module = nn.BatchNorm1d(2)
    with replicas_of(module) as replicas:
        replicas.modules[1].running_mean.fill_(4.0)  # type: ignore[union-attr, operator]
        for averages in (False, True):
            hooks, _ = hooks_of(module, replicas, averages=averages)
            grad(module)
            hooks.step(None, None)
            assert module.running_mean[0].item() == averages * 1.0  # type: ignore[index]


def test_an_optimizer_that_lives_on_keeps_nothing(replicas: Replicas) -> None:
    hooks, _ = hooks_of(replicas.modules[0], replicas)
    (optimizer,) = hooks.optimizers
    gone = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert gone() is None
    grad(replicas.modules[0])
    optimizer.step()


# ---------------------------------------------------------------- norm, rate, scale
def test_clipping_is_of_the_sum(replicas: Replicas) -> None:
    module = replicas.modules[0]
    hooks, _ = hooks_of(module, replicas)
    grad(module, 1.0)
    grad(replicas.modules[1], 2.0)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert hooks.clip(6.0, 2.0).item() == pytest.approx(3.0 * count**0.5)
    clipped = [parameter.grad for parameter in module.parameters()]
    assert all(g is not None and g.max().item() == pytest.approx(6.0 / count**0.5) for g in clipped)
    assert hooks.clip(1e9, float("inf")).item() == pytest.approx(6.0 / count**0.5)


def test_a_step_clips() -> None:
    module = nn.Linear(1, 1, bias=False)
    hooks, _ = hooks_of(module)
    before = module.weight.item()
    grad(module, 100.0)
    hooks.step(None, 0.25)
    assert module.weight.item() == pytest.approx(before - 0.5 * 0.25)


@pytest.mark.parametrize("max_norm", [None, 0.25])
def test_a_scaler_unscales_once_and_skips_what_is_not_finite(max_norm: float | None) -> None:
    module = nn.Linear(1, 1, bias=False)
    hooks, balancer = hooks_of(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
    scaler.scale(torch.zeros(()))
    before = module.weight.item()
    grad(module, 8.0)
    hooks.step(scaler, max_norm)
    assert module.weight.item() == pytest.approx(before - 0.5 * (max_norm or 1.0))
    grad(module, float("inf"))
    hooks.step(scaler, max_norm)
    assert module.weight.item() == pytest.approx(before - 0.5 * (max_norm or 1.0))
    assert scaler.get_scale() == 4.0
    assert (hooks.count, balancer.count) == (1, 1)


def test_the_rate_of_the_first_group_and_the_others_in_proportion() -> None:
    model = mlp()
    hooks, _ = hooks_of(model)
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "lr": 0.4}]
    hooks.use([SGD(groups), SGD(model.parameters(), 0.1)])
    hooks.set_lr(0.1)
    assert [g["lr"] for o in hooks.optimizers for g in o.param_groups] == pytest.approx([0.1, 0.2, 0.05])
    hooks.set_lr(0.0)
    hooks.set_lr(0.3)
    assert [g["lr"] for o in hooks.optimizers for g in o.param_groups] == pytest.approx([0.3, 0.6, 0.15])


def test_a_group_that_is_held_still_stays_so_where_a_rate_is_set() -> None:
    model = mlp()
    hooks, _ = hooks_of(model)
    held, head = model[0].parameters(), model[2].parameters()
    groups = [{"params": held, "lr": 0.0}, {"params": head, "lr": torch.tensor(0.1)}]
    hooks.use(torch.optim.Adam(groups))
    for lr in (0.05, 0.0, 0.2):
        hooks.set_lr(lr)
        rates = [group["lr"] for group in hooks.optimizers[0].param_groups]
        assert [float(rate) for rate in rates] == pytest.approx([0.0, lr])
        assert isinstance(rates[1], torch.Tensor)
    hooks.use([SGD(model[0].parameters(), 0.0), SGD(model[2].parameters(), 0.0)])
    with pytest.raises(OptionError, match=r"all 2 are 0: it cannot know which"):
        hooks.set_lr(0.1)
    hooks.use(SGD(model.parameters(), 0.0))
    hooks.set_lr(0.1)
    assert hooks.optimizers[0].param_groups[0]["lr"] == 0.1
