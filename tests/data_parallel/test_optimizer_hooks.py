"""Whoever asks for a step, all gradients are there before it, and it is learned from after it."""

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

from flowdp.data_parallel.balancer import Alone
from flowdp.data_parallel.optimizer_hooks import Stepping
from flowdp.data_parallel.replicas import Peers
from flowdp.errors import FlowdpError, OptionError
from tests.loops import assert_equal, mlp, numbers, peers_of


class Steps(Alone):
    """Counts them."""

    def __init__(self, samples: tuple[int, ...] = (3, 1)) -> None:
        super().__init__()
        self.count, self.had = 0, samples

    @property
    def samples(self) -> tuple[int, ...]:
        return self.had

    def step(self) -> None:
        self.count += 1


def stepping_of(module: nn.Module, peers: Peers | None = None, **options: Any) -> tuple[Stepping, Steps]:
    pacing = Steps()
    made = Stepping(module, peers, pacing, **{"averages": False, **options})
    made.use(lambda parameters: SGD(parameters, 0.5))
    return made, pacing


def grad(module: nn.Module, value: float = 1.0) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.fixture
def peers() -> Iterator[Peers]:
    with peers_of(mlp()) as peers:
        yield peers


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


# ---------------------------------------------------------------- steps
def test_what_replicas_hold_is_added_before_any_step(peers: Peers) -> None:
    module = peers.modules[0]
    stepping, pacing = stepping_of(module, peers)
    before = values(module)
    for step in (stepping.optimizers[0].step, lambda: stepping.step(None, None)):
        grad(module)
        grad(peers.modules[1], 2.0)
        step()
        assert not peers.has_left(1)
    assert_equal(values(module), [value - 2 * 0.5 * 3 for value in before])
    assert (stepping.count, pacing.count) == (2, 2)


def test_the_first_optimizer_counts_and_each_sees_all_gradients(peers: Peers) -> None:
    module = peers.modules[0]
    stepping, pacing = stepping_of(module, peers)
    one, other = SGD(module[0].parameters(), 0.5), SGD(module[2].parameters(), 0.5)  # type: ignore[index]
    stepping.use([one, other])
    grad(module)
    grad(peers.modules[1])
    before = values(module)
    other.step()
    assert (stepping.count, pacing.count) == (0, 0)
    one.step()
    assert (stepping.count, pacing.count) == (1, 1)
    assert_equal(values(module), [value - 1.0 for value in before])


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_would_unscale_some_alone_is_stopped(peers: Peers, is_enabled: bool) -> None:
    stepping, _ = stepping_of(peers.modules[0], peers)
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    for module in peers.modules:
        scaler.scale(module(numbers(2, 6)).sum()).backward()
    if is_enabled:
        with pytest.raises(FlowdpError, match=r"no_sync\(\) has left.*dp.step\(scaler\)"):
            scaler.step(*stepping.optimizers)
        stepping.collect()
    scaler.step(*stepping.optimizers)
    assert stepping.count == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_steps_that_torch_does_not_count_are_sent(peers: Peers, is_first: bool) -> None:
    """Fused ones, for instance."""
    module = peers.modules[0]
    first, second = (list(module[n].parameters()) for n in (0, 2))  # type: ignore[index]
    stepping, _ = stepping_of(module, peers)
    optimizers = [AdamW(first, 0.1, fused=True), AdamW(second, 0.1, fused=True)]
    stepping.use(optimizers)

    def send() -> None:
        peers.follow()
        peers.each([None, partial(peers.receive, 1)])

    send()
    grad(module)
    optimizers[not is_first].step()
    send()
    assert_equal(values(peers.modules[1]), values(module))
    assert stepping.count == is_first


def test_optimizers_that_are_replaced_count_no_longer() -> None:
    stepping, pacing = stepping_of(mlp())
    (old,) = stepping.optimizers
    with pytest.raises(OptionError):
        stepping.use([])
    assert stepping.optimizers == (old,)
    new = AdamW(stepping._module.parameters())
    stepping.use(new)
    old.step()
    assert pacing.count == 0
    new.step()
    assert pacing.count == 1


def test_without_gradients_there_is_no_step() -> None:
    stepping, pacing = stepping_of(mlp())
    with pytest.raises(FlowdpError, match="no gradients: call backward"):
        stepping.step(None, None)
    assert pacing.count == 0


def test_buffers_are_averaged_at_the_step_where_that_is_wanted() -> None:
    module = nn.BatchNorm1d(2)
    with peers_of(module) as peers:
        peers.modules[1].running_mean.fill_(4.0)  # type: ignore[union-attr, operator]
        for averages in (False, True):
            stepping, _ = stepping_of(module, peers, averages=averages)
            grad(module)
            stepping.step(None, None)
            assert module.running_mean[0].item() == averages * 1.0  # type: ignore[index]


def test_an_optimizer_that_lives_on_keeps_nothing(peers: Peers) -> None:
    stepping, _ = stepping_of(peers.modules[0], peers)
    (optimizer,) = stepping.optimizers
    gone = weakref.ref(stepping)
    del stepping
    gc.collect()
    assert gone() is None
    grad(peers.modules[0])
    optimizer.step()


# ---------------------------------------------------------------- norm, rate, scale
def test_clipping_is_of_the_sum(peers: Peers) -> None:
    module = peers.modules[0]
    stepping, _ = stepping_of(module, peers)
    grad(module, 1.0)
    grad(peers.modules[1], 2.0)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert stepping.clip(6.0, 2.0).item() == pytest.approx(3.0 * count**0.5)
    clipped = [parameter.grad for parameter in module.parameters()]
    assert all(g is not None and g.max().item() == pytest.approx(6.0 / count**0.5) for g in clipped)
    assert stepping.clip(1e9, float("inf")).item() == pytest.approx(6.0 / count**0.5)


def test_a_step_clips() -> None:
    module = nn.Linear(1, 1, bias=False)
    stepping, _ = stepping_of(module)
    before = module.weight.item()
    grad(module, 100.0)
    stepping.step(None, 0.25)
    assert module.weight.item() == pytest.approx(before - 0.5 * 0.25)


@pytest.mark.parametrize("max_norm", [None, 0.25])
def test_a_scaler_unscales_once_and_skips_what_is_not_finite(max_norm: float | None) -> None:
    module = nn.Linear(1, 1, bias=False)
    stepping, pacing = stepping_of(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
    scaler.scale(torch.zeros(()))
    before = module.weight.item()
    grad(module, 8.0)
    stepping.step(scaler, max_norm)
    assert module.weight.item() == pytest.approx(before - 0.5 * (max_norm or 1.0))
    grad(module, float("inf"))
    stepping.step(scaler, max_norm)
    assert module.weight.item() == pytest.approx(before - 0.5 * (max_norm or 1.0))
    assert scaler.get_scale() == 4.0
    assert (stepping.count, pacing.count) == (1, 1)


def test_the_rate_of_the_first_group_and_the_others_in_proportion() -> None:
    model = mlp()
    stepping, _ = stepping_of(model)
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "lr": 0.4}]
    stepping.use([SGD(groups), SGD(model.parameters(), 0.1)])
    stepping.set_lr(0.1)
    assert [g["lr"] for o in stepping.optimizers for g in o.param_groups] == pytest.approx([0.1, 0.2, 0.05])
    stepping.set_lr(0.0)
    stepping.set_lr(0.3)
    assert [g["lr"] for o in stepping.optimizers for g in o.param_groups] == [0.3, 0.3, 0.3]
