"""Tests of gradients in flat memory: accumulated by backward, which records the parameters it reached."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective.host import HostMean
from flowdp.device.flat_gradients import SharedGradients
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import open_lanes
from flowdp.protocol.gate import Arrival, Directives, Window, decide


class Zoo(nn.Module):
    """Several kinds of parameters and buffers, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(4, 3).double()
        self.narrow = nn.Linear(4, 3).bfloat16()
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.tied = self.wide.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).mean((2, 3))
        h = self.wide(h.double()).float() + self.narrow(h.bfloat16()).float() + self.frozen
        return (h * self.turn).abs().sum() + self.tied.sum().float()


def open_all(count: int = 1) -> tuple[list[nn.Module], list[SharedGradients]]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Zoo()]
    modules += [copy.deepcopy(modules[0]) for _ in range(count - 1)]
    return modules, [SharedGradients(FlatReplica(module, rank)) for rank, module in enumerate(modules)]


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def data(seed: int) -> Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def meet(all_of: Sequence[SharedGradients], samples: Sequence[int]) -> None:
    members = tuple(range(len(all_of)))
    mean = HostMean(all_of, open_lanes([torch.device("cpu")] * len(all_of)), lambda rank: None)
    for rank in members:
        mean.prepare(rank)
    outcome = decide(
        {
            rank: Arrival(rank, 0, 0, 1, samples[rank], window=Window(touched=all_of[rank].touched))
            for rank in members
        },
        Directives(),
        len(members),
    )
    mean.launch(outcome)
    for rank in members:
        mean.average(rank, outcome)
    assert outcome.window is not None
    for gradients in all_of:
        gradients.show(gradients.settle(outcome.window.touched))


def test_backward_adds_up_in_the_flat_memory() -> None:
    [module], [gradients] = open_all()
    plain = copy.deepcopy(module)
    plain.zero_grad()
    for seed in (1, 2):
        module(data(seed)).backward()
        plain(data(seed)).backward()
    gradients.gather()
    gradients.show(gradients.settle(gradients.touched))
    for mine, theirs in zip(trained(module), trained(plain), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
            continue
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
        assert mine.grad.stride() == mine.stride()
        assert any(
            flat.memory.untyped_storage().data_ptr() == mine.grad.untyped_storage().data_ptr()
            for flat in gradients.flats
        )
    gradients.clear()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trained(module))


def test_the_mean_is_that_of_all_samples_with_buffers() -> None:
    modules, all_of = open_all(3)
    for rank, module in enumerate(modules[:2]):
        module(data(rank)).backward()
    mine = [[p.grad.clone() for p in trained(module) if p is not module.idle] for module in modules]
    means = [module.norm.running_mean.clone() for module in modules]
    meet(all_of, (3, 1, 0))
    for module in modules:
        kept = [p for p in trained(module) if p is not module.idle]
        assert module.idle.grad is None
        for at, parameter in enumerate(kept):
            expected = mine[0][at] * 0.75 + mine[1][at] * 0.25
            torch.testing.assert_close(parameter.grad, expected)
        torch.testing.assert_close(module.norm.running_mean, means[0] * 0.75 + means[1] * 0.25)
        assert module.norm.num_batches_tracked == 1
    assert len({tuple(p.grad.sum().item() for p in trained(m) if p.grad is not None) for m in modules}) == 1


def test_what_any_rank_has_touched_is_there_for_all() -> None:
    modules, all_of = open_all(2)
    modules[0].wide.bias.sum().backward()
    modules[1].idle.sum().backward()
    meet(all_of, (1, 1))
    for module in modules:
        there = {name for name, p in module.named_parameters() if p.grad is not None}
        assert there == {"frozen", "wide.bias", "idle"} - {"frozen"}
        assert torch.equal(module.idle.grad, torch.full((2,), 0.5))
    for gradients in all_of:
        gradients.clear()
        assert not gradients.is_touched
    modules[0].wide.bias.sum().backward()
    assert [gradients.is_touched for gradients in all_of] == [True, False]
    meet(all_of, (1, 1))
    assert {name for name, p in modules[1].named_parameters() if p.grad is not None} == {"wide.bias"}


def test_one_answer_for_all_whatever_a_rank_without_a_part_touched_before() -> None:
    """The device is asked only where the ranks with samples touched different parameters."""
    modules, all_of = open_all(3)
    for samples in ((1, 1, 0), (2, 1, 0), (1, 3, 0)):
        for module, count in zip(modules, samples, strict=True):
            for _ in range(count):
                module.wide.bias.sum().backward()
        meet(all_of, samples)
        for module in modules:
            assert [name for name, p in module.named_parameters() if p.grad is not None] == ["wide.bias"]
        for gradients in all_of:
            gradients.clear()
        for gradients in all_of:
            gradients._numbers = torch.empty(0)  # to write or read there would be an error from now on


@pytest.mark.parametrize("how", ["replaced", "set to none", "zeroed"])
def test_a_gradient_that_somebody_took_away(how: str) -> None:
    """The value of `grad` counts."""
    [module], [gradients] = open_all()
    bias = module.wide.bias
    bias.sum().backward()
    if how == "replaced":
        bias.grad = torch.full_like(bias, 5.0)
    elif how == "set to none":
        bias.grad = None
    else:
        assert bias.grad is not None
        bias.grad.zero_()
    gradients.gather()
    memory = next(flat.memory for flat in gradients.flats if flat.memory.dtype == torch.float64)
    assert set(memory.unique().tolist()) == ({0.0, 5.0} if how == "replaced" else {0.0})
    gradients.show(gradients.settle(gradients.touched))
    assert (bias.grad is None) == (how == "set to none")
    gradients.clear()
    bias.sum().backward()
    gradients.gather()
    assert torch.equal(bias.grad, torch.ones_like(bias))


def test_the_norm_is_of_all_gradients_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowdp.device.flat_gradients.BLOCK", 7)
    [module], [gradients] = open_all()
    module(data(1)).backward()
    gradients.gather()  # buffers exist now, and are not concerned
    gradients.weight.fill_(1e6)
    parts = [torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad for p in trained(module)]
    expected = torch.cat([part.flatten().double() for part in parts]).norm()
    torch.testing.assert_close(gradients.norm(), expected)
    before = [part.clone() for part in parts]
    gradients.clip(2 * expected.item())
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
    gradients.clip(0.5)
    assert gradients.norm().item() == pytest.approx(0.5, rel=1e-3)
    for flat in gradients.flats[:-1]:
        assert flat.memory.isfinite().all()
    assert gradients.weight == 1e6


def test_a_weight_divides_gradients_alone() -> None:
    modules, all_of = open_all(2)
    for module, gradients, weight in zip(modules, all_of, (2.0, 6.0), strict=True):
        module(data(1)).backward()
        gradients.weight.add_(weight)
    all_of[0].is_weighted = True
    before = modules[0].conv.weight.grad.clone()
    mean = modules[0].norm.running_mean.clone()
    meet(all_of, (1, 1))
    for module in modules:
        torch.testing.assert_close(module.conv.weight.grad, before / 4.0)
        torch.testing.assert_close(module.norm.running_mean, mean)
