"""Tests of making models, replicas and optimizers from the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from flowdp.device.streams import HostLane
from flowdp.errors import OptionError
from flowdp.replica.factories import (
    build_models,
    build_optimizers,
    equal_start,
    seed_devices,
)

CPU = torch.device("cpu")
ONE = [HostLane(CPU)]
TWO = [HostLane(CPU), HostLane(CPU)]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


# ---------------------------------------------------------------- models
def test_an_instance_is_copied_and_left_alone() -> None:
    model = net().eval()
    model(torch.randn(5, 3)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replicas = build_models(model, TWO)
    for replica in replicas:
        assert replica.training
        assert all(parameter.grad is None for parameter in replica.parameters())
        replica(torch.randn(5, 3))
        with torch.no_grad():
            replica[0].weight.zero_()
    assert not model.training
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("is_factory", [False, True])
def test_the_log_says_once_which_modes_are_trained(
    is_factory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def told(make: Callable[[], nn.Module]) -> list[str]:
        caplog.clear()
        build_models(make if is_factory else make(), TWO)
        return caplog.messages

    def frozen() -> nn.Module:
        model = net()
        model[1].eval()
        return model

    assert told(net) == told(frozen) == []
    [line] = told(lambda: net().eval())
    assert line.startswith(
        "the model was given in eval mode, and is trained with all of its parts in training"
    )


# ---------------------------------------------------------------- replicas
@pytest.mark.parametrize("is_factory", [False, True])
@pytest.mark.parametrize("lanes", [ONE, TWO])
def test_parameters_over_one_memory_are_refused_before_copies_part_them(
    is_factory: bool, lanes: list[HostLane]
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.data = model[0].weight.data
        return model

    given = make if is_factory else make()
    with pytest.raises(OptionError, match=r"'1.weight' lies in the memory of '0.weight'.*one nn.Parameter"):
        build_models(given, lanes)
    assert len(build_models(given, lanes, trains=False)) == len(lanes)  # equal values, and nobody writes


def test_all_replicas_start_from_rank_0() -> None:
    def factory() -> nn.Module:
        model = net()
        model[0].weight.requires_grad_(False)
        model[1].running_mean.normal_()
        return model

    modules = build_models(factory, ONE * 3)
    equal_start(modules, ONE * 3)
    expected = modules[0].state_dict()
    for module in modules[1:]:
        for name, value in module.state_dict().items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("frozen", "match"),
    [
        (False, r"'0.weight' is float32 \(5, 3\) on rank 1 and float32 \(4, 3\) on rank 0"),
        (True, r"'0.weight' is float32 \(5, 3\) frozen on rank 1 and .*\(4, 3\) frozen on rank 0"),
    ],
)
def test_replicas_that_differ(frozen: bool, match: str) -> None:
    sizes = iter([4, 5])

    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, next(sizes), bias=False), nn.Tanh(), nn.PReLU())
        model[0].weight.requires_grad_(not frozen)
        return model

    with pytest.raises(OptionError, match=match):
        equal_start(build_models(factory, TWO), TWO)


# ---------------------------------------------------------------- optimizers
def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.5},
    ]


def test_an_instance_is_rebuilt_with_groups_and_state() -> None:
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=1.0, betas=(0.8, 0.9))
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    [replica] = build_models(model, ONE)
    assert isinstance(replica, nn.Sequential)
    [twin] = build_optimizers(optimizer, replica, model)

    assert type(twin) is torch.optim.AdamW
    assert [group["lr"] for group in twin.param_groups] == [0.1, 0.02]
    assert [group["weight_decay"] for group in twin.param_groups] == [0.01, 0.5]
    assert twin.param_groups[0]["betas"] == (0.8, 0.9)
    assert twin.defaults == optimizer.defaults
    assert twin.param_groups[1]["params"][0] is replica[2].weight
    momentum = twin.state[replica[0].weight]["exp_avg"]
    assert torch.equal(momentum, optimizer.state[model[0].weight]["exp_avg"])
    assert momentum is not optimizer.state[model[0].weight]["exp_avg"]


def test_a_factory_gets_what_requires_grad_or_the_module() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    got: list[object] = []

    def by_parameters(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        got.append([tuple(parameter.shape) for parameter in params])
        return torch.optim.SGD(params, 0.1)

    def by_model(model: nn.Sequential) -> torch.optim.Optimizer:
        got.append(model)
        return torch.optim.SGD(groups(model), 0.1)

    build_optimizers(by_parameters, model, None)
    [grouped] = build_optimizers(by_model, model, None)
    assert len(grouped.param_groups) == 2
    assert got == [[(4,), (4,), (4,), (1, 4), (1,)], model]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda other: lambda params: torch.optim.SGD(other.parameters(), 0.1), "another model"),
        (lambda other: lambda params: 3, "returned int, not a torch optimizer"),
        (lambda other: torch.optim.SGD(other.parameters(), 0.1), "6 parameters that are not the model's"),
    ],
)
def test_optimizers_of_something_else(make: Callable[[nn.Module], Any], match: str) -> None:
    model, other = net(), net()
    with pytest.raises(OptionError, match=match):
        build_optimizers(make(other), build_models(model, ONE)[0], model)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_on_steps_that_a_rebuilt_optimizer_would_lose_are_refused(register: str) -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowdp.setup(model, optimizer, devices=["cpu"] * 2):
        pass
    build_optimizers(optimizer, twin, model)  # hooks that setup has left there do not count
    getattr(optimizer, register)(lambda *_: None)
    with pytest.raises(OptionError, match=r"SGD has hooks .*lambda params"):
        build_optimizers(optimizer, twin, model)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_each_card_is_seeded_once_and_the_cpu_never(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    seeded: list[tuple[torch.device, int]] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "device", device)
    monkeypatch.setattr(module, "manual_seed", lambda seed: seeded.append((current[-1], seed)))
    first, second = torch.device(kind, 0), torch.device(kind, 1)
    before = torch.get_rng_state()
    seed_devices([first, CPU, second, first], 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert [device for device, _ in seeded] == [first, second]
    assert seeded[0][1] != seeded[1][1]
    again, seeded[:] = seeded[:], []
    seed_devices([first, CPU, second, first], 7)
    assert seeded == again
    seeded.clear()
    seed_devices([first], 8)
    assert seeded[0] != again[0]


# ---------------------------------------------------------------- refusals


def test_modules_that_hand_out_batches_themselves_are_refused() -> None:
    with flowdp.setup(nn.Linear(2, 1), devices=["cpu"], progress=False) as dp:
        for model, whose in (
            (dp, "it is a flowdp DataParallel"),
            (lambda: nn.Sequential(dp), "its part '0' is a flowdp DataParallel"),
            (nn.DataParallel(nn.Linear(2, 1)), "it is a torch DataParallel"),
        ):
            with pytest.raises(OptionError, match=f"model: {whose}, which.* give its .module"):
                build_models(model, ONE)
