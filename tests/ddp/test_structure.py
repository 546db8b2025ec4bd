from __future__ import annotations

import pytest
import torch
from torch import nn

from flowdp.ddp.structure import check_alike, check_apart, structure
from flowdp.errors import OptionError


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_equal_models_are_alike():
    check_alike([structure(model()) for _ in range(3)])
    assert next(iter(structure(model()))) == "0.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m[0].weight.requires_grad_(False), "'0.weight'.*frozen"),
        (lambda m: m.double(), "'0.weight'.*float64"),
        (lambda m: m.register_buffer("more", m[0].weight.data), "'more' is missing on rank 0"),
        (lambda m: m.__setitem__(0, nn.Linear(2, 3, bias=False)), "'0.bias'.*missing on rank 1"),
        (lambda m: m[1].register_buffer("running_mean", m[0].weight.data), r"'1.running_mean'.*\(3, 2\)"),
    ],
)
def test_what_differs_is_named(change, said):
    other = model()
    change(other)
    with pytest.raises(OptionError, match=said):
        check_alike([structure(model()), structure(other)])


def test_another_order_is_another_structure():
    one, other = nn.Module(), nn.Module()
    for name in "ab":
        one.add_module(name, nn.Linear(2, 2))
    for name in "ba":
        other.add_module(name, nn.Linear(2, 2))
    with pytest.raises(OptionError, match=r"another order, from 'a\.weight' on"):
        check_alike([structure(one), structure(other)])


def test_models_apart():
    first, second, third = model(), model(), model()
    check_apart([first, second, third])
    check_apart([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")])
    third[1].weight = first[1].weight
    with pytest.raises(OptionError, match=r"'1\.weight' is the same tensor in models 0 and 2"):
        check_apart([first, second, third])


def test_models_that_were_loaded_without_a_copy_are_not_apart():
    first, second = model(), model()
    second.load_state_dict(first.state_dict(), assign=True)
    with pytest.raises(OptionError, match=r"'0\.weight' is the same tensor in models 0 and 1"):
        check_apart([first, second])
    first[1].register_buffer("sparse", torch.zeros(3).to_sparse())
    check_apart([first, model()])
