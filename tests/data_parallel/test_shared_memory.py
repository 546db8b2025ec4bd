"""Tests of shared memory: CPU replicas use the user's parameters, unless the module writes to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.scatter import Arguments, CallArguments
from flowdp.data_parallel.sharded_call import call_sharded, cut
from flowdp.errors import FlowdpError
from tests.loops import assert_equal, gradients, mlp, numbers, replicas_of


def call(replicas: Replicas, x: Tensor) -> Tensor:
    sizes = [len(x) // len(replicas.modules)] * len(replicas.modules)
    found: Tensor = call_sharded(replicas, cut(Arguments((x,)), sizes), _run)
    return found


def _run(module: nn.Module, part: CallArguments) -> Any:
    return module(*part.args, **part.kwargs)


def is_shared(replicas: Replicas) -> list[bool]:
    """For each parameter, whether all ranks have it in one memory."""
    columns = zip(*(module.parameters() for module in replicas.modules), strict=True)
    return [len({tensor.data_ptr() for tensor in column}) == 1 for column in columns]


def test_memory_is_shared_behind_the_first_training_call() -> None:
    with replicas_of(mlp(), 3) as replicas:
        for mode in (False, True):
            assert not any(is_shared(replicas))
            replicas.modules[0].train(mode)
            call(replicas, numbers(6, 6))
        assert all(is_shared(replicas))
        parameters = zip(*(module.parameters() for module in replicas.modules), strict=True)
        assert all(len(set(map(id, column))) == 3 for column in parameters), "each has gradients of its own"


WRITES: dict[str, Callable[[Any], object]] = {
    "data in place": lambda m: [p.data.mul_(1.1) for p in m.parameters()],
    "data replaced": lambda m: [setattr(p, "data", p.data * 1.1) for p in m.parameters()],
    "no_grad": torch.no_grad()(lambda m: [p.mul_(1.1) for p in m.parameters()]),
    "a new parameter": lambda m: setattr(m[0], "bias", nn.Parameter(m[0].bias.detach() * 1.1)),
    "frozen": lambda m: m[0].requires_grad_(False),
    "numpy": lambda m: m[0].bias.detach().numpy().fill(0.3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("count", [2, 3])
def test_whatever_writes_reaches_all_ranks(write: str, count: int) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with replicas_of(module, count) as replicas:
        for _ in range(4):
            for run, model in ((partial(call, replicas), module), (twin, twin)):
                run(numbers(6, 6)).square().sum().backward()
                WRITES[write](model)
            assert_equal(gradients(module), gradients(twin))
        assert all(is_shared(replicas)) or "new" in write or "replaced" in write
        call(replicas, numbers(6, 6))
        assert all(is_shared(replicas))


@pytest.mark.parametrize("kind", ["tied", "weight_norm", "spectral_norm", "frozen", "channels_last", "lstm"])
def test_modules_of_all_kinds_share(kind: str) -> None:
    torch.manual_seed(2)
    module: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    x = numbers(6, 6)
    if kind == "tied":
        module[2].weight = module[0].weight
    elif kind == "weight_norm":
        parametrizations.weight_norm(module[0])
    elif kind == "spectral_norm":
        parametrizations.spectral_norm(module[0])
        module.eval()
    elif kind == "frozen":
        module[0].requires_grad_(False)
    elif kind == "channels_last":
        module, x = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last), numbers(6, 3, 5, 5)  # type: ignore[call-overload]
    elif kind == "lstm":
        module = nn.Sequential(nn.LSTM(6, 6, batch_first=True), First(), nn.Linear(6, 3)).double()
        x = numbers(6, 4, 6)
    twin = copy.deepcopy(module)
    with replicas_of(module) as replicas:
        for _ in range(3):
            for run, model in ((partial(call, replicas), module), (twin, twin)):
                run(x).square().sum().backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-0.01)
            assert_equal(gradients(module), gradients(twin))
        assert all(is_shared(replicas)) is (kind != "spectral_norm")


class First(nn.Module):
    def forward(self, both: tuple[Tensor, Any]) -> Tensor:
        return both[0]


class Normalizing(nn.Module):
    """Its forward writes to its weight, with or without a change of its version."""

    def __init__(self, *, is_counted: bool) -> None:
        super().__init__()
        self.is_counted = is_counted
        self.inner = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            weight = self.inner.weight
            normal = weight.detach() / weight.detach().norm(dim=1, keepdim=True)
            with torch.no_grad():
                (weight if self.is_counted else weight.data).copy_(normal)
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_the_forward_writes_to_is_not_shared(is_counted: bool) -> None:
    module = Normalizing(is_counted=is_counted)
    twin = copy.deepcopy(module)
    with replicas_of(module) as replicas:
        for _ in range(3):
            for run, model in ((partial(call, replicas), module), (twin, twin)):
                run(numbers(6, 6)).square().sum().backward()
                for parameter in model.parameters():
                    parameter.data.add_(parameter.grad, alpha=-0.01)
                model.zero_grad()
        assert_equal([p.detach() for p in module.parameters()], [p.detach() for p in twin.parameters()])
        assert is_shared(replicas) == [False, True]


def test_a_forward_that_begins_to_write_later_is_refused() -> None:
    late = Late()
    with replicas_of(late) as replicas:
        call(replicas, numbers(6, 6))
        late.writes = True
        with pytest.raises(FlowdpError, match=r"wrote to its parameter 'inner.weight', which all"):
            call(replicas, numbers(6, 6))


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writes = False
        self.inner = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.inner.weight.clamp_(-0.1, 0.1)
        out: Tensor = self.inner(x)
        return out


def test_a_forward_that_writes_by_its_part_of_the_batch_is_refused() -> None:
    module = nn.Embedding(20, 4, max_norm=0.5)
    with (
        replicas_of(module) as replicas,
        pytest.raises(FlowdpError, match="'weight' by its part of the batch"),
    ):
        call(replicas, torch.arange(10))


def test_a_step_between_forward_and_backward_is_found_in_the_graphs_of_all_ranks() -> None:
    """As on one device, even if the first rank has no part."""
    module = mlp()
    with replicas_of(module) as replicas:
        call(replicas, numbers(6, 6))
        for is_old in (True, False):
            out = call_sharded(replicas, cut(Arguments((numbers(4, 6),)), (0, 4)), _run)
            if is_old:
                with torch.no_grad():
                    module[2].weight.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.sum().backward()
            else:
                out.sum().backward()
