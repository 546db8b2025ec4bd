"""Tests of the moving average of a replica's parameters, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.weight_average import WeightAverage

DECAY = 0.9


class Mixed(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(5)
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)


def averaged(module: nn.Module) -> tuple[WeightAverage, FlatReplica]:
    flat = FlatReplica(module)
    return WeightAverage(flat, module, DECAY), flat


def move(module: nn.Module) -> None:
    """Change all trained parameters, as a step does."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("is_moved", [False, True])
def test_it_is_torchs_average_step_by_step(is_moved: bool) -> None:
    module = Mixed()
    average, _ = averaged(module)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    if is_moved:  # out of the flat memory, as `weight.data = ...` does
        module.wide.data = module.wide.data.clone()
    for _ in range(5):
        move(module)
        average.update()
        theirs.update_parameters(module)
        wanted = dict(theirs.module.named_parameters(remove_duplicate=False))
        found = average.named()
        assert found.keys() == wanted.keys() - {"frozen"}
        for name, own in found.items():
            torch.testing.assert_close(own, wanted[name].detach(), rtol=1e-6, atol=1e-7)
    assert found["two.weight"].data_ptr() == found["one.weight"].data_ptr()


def test_narrow_parameters_have_a_wide_average() -> None:
    """In bfloat16 a step of a thousandth of the way is no step."""
    module = nn.Linear(4, 4).bfloat16()
    flat = FlatReplica(module)
    average = WeightAverage(flat, module, 0.999)
    average.update()
    begin = average.named()["weight"].clone()
    with torch.no_grad():
        module.weight.add_(1.0)
    for _ in range(10):
        average.update()
    moved = average.named()["weight"] - begin
    assert moved.dtype == torch.float32
    wanted = (1 - 0.999**10) * (module.weight.detach().float() - begin)
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-6)
    with average.applied():
        assert torch.equal(module.weight, average.named()["weight"].bfloat16())


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_module_has_the_average_within_the_block(is_moved: bool) -> None:
    module = Mixed()
    average, flat = averaged(module)
    average.update()
    if is_moved:
        module.wide.data = module.wide.data.clone()
        module.norm.running_mean = module.norm.running_mean + 1.0  # type: ignore[operator]
    move(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    average.update()

    def evaluate() -> None:
        with average.applied():
            for name, own in average.named().items():
                assert torch.equal(module.get_parameter(name), own), name
                assert not torch.equal(own, before[name]), name
            module.norm.running_mean.add_(1.0)  # type: ignore[operator]
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    for name, value in module.state_dict().items():
        if name == "norm.running_mean":
            assert torch.equal(value, before[name] + 1.0)  # buffers are the module's own
        else:
            assert torch.equal(value, before[name]), name
    assert torch.equal(flat.flats[0].memory, FlatReplica(module).flats[0].memory)


def test_a_saved_average_goes_on() -> None:
    module, other = Mixed(), Mixed()
    average, _ = averaged(module)
    later, _ = averaged(other)
    for _ in range(3):
        move(module)
        average.update()
    later.restore({name: value.clone() for name, value in average.named().items()})
    later_named = later.named()
    assert all(torch.equal(value, later_named[name]) for name, value in average.named().items())
    move(other)
    later.update()  # it has begun: no copy
    assert not torch.equal(later.named()["wide"], other.wide)
    later.restore({})
    assert torch.equal(later.named()["wide"], other.wide)
    move(other)
    later.update()
    assert torch.equal(later.named()["wide"], other.wide)
    with pytest.raises(KeyError):
        later.restore({"wide": other.wide})


def test_a_mean_begins_it() -> None:
    """A rank whose first step comes behind a mean goes on from the others' average."""
    module = Mixed()
    average, flat = averaged(module)
    assert len(average.flats) > len(flat.flats)
    assert [one.is_measured for one in average.flats].count(False) == len(average.averages)
    average.gather()
    average.scatter()
    move(module)
    average.update()
    assert not torch.equal(average.named()["wide"], module.wide)


def test_another_replicas_average_is_copied() -> None:
    mine, theirs = averaged(Mixed())[0], averaged(Mixed())[0]
    theirs.update()
    with torch.no_grad():
        for memory in theirs.averages:
            memory.add_(1.0)
    mine.copy_from(theirs)
    assert mine.has_begun
    same: list[Tensor] = [*mine.named().values()]
    assert all(torch.equal(one, other) for one, other in zip(same, theirs.named().values(), strict=True))
