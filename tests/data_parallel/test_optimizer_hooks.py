"""Tests of hooks on optimizers: what happens around their steps."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from flowdp.data_parallel.optimizer_hooks import OptimizerHooks
from flowdp.errors import OptionError
from tests.loops import mlp


class Steps:
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1


def hooks_of(module: nn.Module) -> tuple[OptimizerHooks, Steps]:
    steps = Steps()
    made = OptimizerHooks(module)
    made.use(lambda parameters: SGD(parameters, 0.5), steps.step)
    return made, steps


def grad(module: nn.Module, value: float = 1.0) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


# ---------------------------------------------------------------- steps


def test_optimizers_that_are_replaced_count_no_longer() -> None:
    hooks, steps = hooks_of(mlp())
    (old,) = hooks.optimizers
    with pytest.raises(OptionError):
        hooks.use(3, steps.step)  # type: ignore[arg-type]
    assert hooks.optimizers == (old,)
    new = AdamW(hooks._module.parameters())
    hooks.use(new, steps.step)
    old.step()
    assert steps.count == 0
    new.step()
    assert (steps.count, hooks.steps) == (1, 1)


def test_an_optimizer_that_lives_on_keeps_nothing() -> None:
    module = mlp()
    hooks, _ = hooks_of(module)
    (optimizer,) = hooks.optimizers
    gone = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert gone() is None
    grad(module)
    optimizer.step()


# ---------------------------------------------------------------- norm, rate, scale


def test_a_group_that_is_held_still_stays_so_where_a_rate_is_set() -> None:
    model = mlp()
    hooks, steps = hooks_of(model)
    held, head = model[0].parameters(), model[2].parameters()
    groups = [{"params": held, "lr": 0.0}, {"params": head, "lr": torch.tensor(0.1)}]
    hooks.use(torch.optim.Adam(groups), steps.step)
    for lr in (0.05, 0.2):
        hooks.set_lr(lr)
        rates = [group["lr"] for group in hooks.optimizers[0].param_groups]
        assert [float(rate) for rate in rates] == pytest.approx([0.0, lr])
        assert isinstance(rates[1], torch.Tensor)
    hooks.use([SGD(model[0].parameters(), 0.0), SGD(model[2].parameters(), 0.0)], steps.step)
    with pytest.raises(OptionError, match=r"all 2 are 0: it cannot know which"):
        hooks.set_lr(0.1)
    hooks.use(SGD(model.parameters(), 0.0), steps.step)
    hooks.set_lr(0.1)
    assert hooks.optimizers[0].param_groups[0]["lr"] == 0.1
