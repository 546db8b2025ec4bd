"""Tests of the look at frozen parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.frozen_parameters import FrozenCheck, frozen_sums
from flowdp.errors import CollectiveError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(3, 5).requires_grad_(False)
    return nn.Sequential(nn.Linear(3, 3), frozen)


def noted(module: nn.Module) -> FrozenCheck:
    check = FrozenCheck(module, "Do something else.")
    check.begin()
    return check


WRITES: dict[str, Callable[[Tensor], None]] = {
    "counted": lambda weight: weight.mul_(0.5),
    "not counted": lambda weight: weight.data.mul_(0.5),
    "moved": lambda weight: setattr(weight, "data", weight.data * 0.5),
    "the last bit of the last element": lambda weight: weight.data.view(torch.int32)[4, 2].add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen_however_it_is_made(write: Callable[[Tensor], None]) -> None:
    module = model()
    parameters = noted(module)
    assert parameters.changed() == []
    module[0].weight.data.zero_()
    assert parameters.changed() == []
    write(module[1].weight)
    assert parameters.changed() == ["1.weight"]
    parameters.begin()
    assert parameters.changed() == []


def test_a_write_of_what_is_there_is_none() -> None:
    module = model()
    parameters = noted(module)
    module[1].weight.copy_(module[1].weight.clone())
    assert parameters.changed() == []


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(7, dtype=torch.uint8),
        torch.arange(7) > 2,
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(()),
        torch.randn(8)[1:],
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(4, 3).t(),
        torch.randn(0, 3),
    ],
    ids=lambda values: f"{values.dtype}, {tuple(values.shape)}",
)
def test_parameters_of_any_form_have_a_sum(values: Tensor) -> None:
    module = nn.Module()
    module.frozen = nn.Parameter(values.clone(memory_format=torch.preserve_format), requires_grad=False)
    before = frozen_sums(module)["frozen"]
    assert before.dtype is torch.int64
    assert before.shape == ()
    module.frozen.data = values  # elsewhere in memory, and maybe off the boundary of 8 bytes
    assert frozen_sums(module)["frozen"] == before
    if values.numel():
        module.frozen.data = values.roll(1) ^ True if values.dtype is torch.bool else values + 1
        assert frozen_sums(module)["frozen"] != before


def test_the_sum_of_a_replica_is_of_frozen_parameters_too() -> None:
    one, other = model(), model()
    first, second = FlatReplica(one), FlatReplica(other)
    assert first.checksum() == second.checksum()
    other[1].bias.data[2] += 1e-6
    assert first.checksum() != second.checksum()


def test_they_are_checked_at_growing_distances_in_each_epoch_and_at_the_end() -> None:
    module = model()
    check = noted(module)
    check.met(0)
    check.met(0)
    module[1].weight.data.mul_(0.5)
    check.met(0)  # the third
    with pytest.raises(CollectiveError, match=r"parameter '1.weight' has changed .* Do something else\."):
        check.check()
    with pytest.raises(CollectiveError, match=r"'1.weight' has changed"):
        check.met(0)  # the fourth
    with pytest.raises(CollectiveError, match=r"'1.weight' has changed"):
        check.met(1)
    module[1].bias.data.mul_(0.5)
    with pytest.raises(CollectiveError, match=r"'1.weight' and 1 more have changed"):
        check.check()
