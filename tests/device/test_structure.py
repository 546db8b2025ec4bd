from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flowdp.device.structure import (
    check_no_overlap,
    check_same,
    check_separate_memory,
    difference,
    structure,
)
from flowdp.errors import OptionError


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_the_structure_of_a_model() -> None:
    net = model().half()
    net[0].bias.requires_grad_(False)
    net[1].twin = net[0].weight
    assert structure(net) == {
        "0.weight": "float16 (3, 2)",
        "0.bias": "float16 (3,) frozen",
        "1.weight": "float16 (3,)",
        "1.bias": "float16 (3,)",
        "1.running_mean": "float16 (3,) buffer",
        "1.running_var": "float16 (3,) buffer",
        "1.num_batches_tracked": "int64 () buffer",
    }
    assert "1.twin" in structure(net, as_saved=True)
    with pytest.raises(OptionError, match=r"'weight' has no shape yet"):
        structure(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m[0].weight.requires_grad_(False), "'0.weight' is .*frozen here and"),
        (lambda m: m.double(), "'0.weight' is float64.* here and float32 .* there"),
        (lambda m: m.register_buffer("more", m[0].weight.data), r"'more' is .* here and missing there"),
        (lambda m: m.__setitem__(0, nn.Linear(2, 3, bias=False)), "'0.bias' is missing here and"),
        (lambda m: m[1].register_buffer("running_mean", m[0].weight.data), r"'1.running_mean'.*\(3, 2\)"),
        (
            lambda m: setattr(m[0].weight, "data", torch.ones(2, 3).t()),
            r"'0.weight' .* with strides \(1, 3\) here",
        ),
    ],
)
def test_the_first_difference_is_named(change, said) -> None:
    other = model()
    change(other)
    with pytest.raises(OptionError, match=rf"^the models differ: {said}.*; build it anew$"):
        check_same([structure(model()), structure(other)], ["there", "here"], "build it anew")


def test_equal_models_have_no_difference() -> None:
    assert difference(structure(model()), structure(model()), "here", "there") == ""


# ---------------------------------------------------------------- memory that tensors share
def pair() -> nn.Module:
    net = nn.Module()
    net.a, net.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    return net


def set_data(weight: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], None]:
    return lambda net: setattr(net.b.weight, "data", weight(net))


def as_array(net: nn.Module) -> None:
    net.b.weight.data = torch.from_numpy(net.a.weight.detach().numpy())  # another storage over its memory


def as_buffer(net: nn.Module) -> None:
    del net.b.weight
    net.b.register_buffer("weight", net.a.weight.data)


def as_frozen(net: nn.Module) -> None:
    net.b.weight.data = net.a.weight.data
    net.b.requires_grad_(False)


@pytest.mark.parametrize(
    "share",
    [
        set_data(lambda net: net.a.weight.data),
        set_data(lambda net: net.a.weight.data.t()),
        set_data(lambda net: net.a.weight.data[:3]),
        set_data(lambda net: net.a.weight.data.view(torch.bfloat16)),
        as_array,
        as_buffer,
        as_frozen,
    ],
)
def test_a_trained_parameter_that_shares_its_memory_is_refused(share: Callable[[nn.Module], object]) -> None:
    net = pair()
    share(net)
    with pytest.raises(OptionError, match=r"'b.weight' lies in the memory of 'a.weight'.*model.b.weight = "):
        check_no_overlap(net)


def tie(net: nn.Module) -> None:
    net.b.weight = net.a.weight


def columns(net: nn.Module) -> None:
    memory = torch.randn(6, 12)
    net.a.weight.data, net.b.weight.data = memory[:, :6], memory[:, 6:]


def flatten(net: nn.Module) -> None:
    torch.nn.utils.vector_to_parameters(torch.randn(72), net.parameters())


def freeze(net: nn.Module) -> None:
    net.b.weight.data = net.a.weight.data
    net.requires_grad_(False)


def share_buffers(net: nn.Module) -> None:
    table = torch.arange(4)
    net.register_buffer("table", table)
    net.register_buffer("head", table[:2])


@pytest.mark.parametrize("share", [tie, columns, flatten, freeze, share_buffers, lambda net: net.to("meta")])
def test_what_does_not_come_apart_is_taken(share: Callable[[nn.Module], object]) -> None:
    net = pair()
    share(net)
    check_no_overlap(net)
    check_no_overlap(nn.LazyLinear(3))


def test_models_of_all_ranks_are_compared() -> None:
    check_same([structure(model()) for _ in range(3)])
    with pytest.raises(OptionError, match=r"'0\.weight' is float32 \(4, 2\) on rank 1 and .* on rank 0"):
        check_same([structure(model()), structure(model(4))])


def test_models_apart() -> None:
    first, second, third = (model() for _ in range(3))
    check_separate_memory([first, second, third])
    check_separate_memory([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")])
    third[1].weight = first[1].weight
    with pytest.raises(OptionError, match=r"'1\.weight' is the same tensor in models 0 and 2"):
        check_separate_memory([first, second, third])


def test_models_that_were_loaded_without_a_copy_are_not_apart() -> None:
    first, second = model(), model()
    second.load_state_dict(first.state_dict(), assign=True)
    with pytest.raises(OptionError, match=r"'0\.weight' is the same tensor in models 0 and 1"):
        check_separate_memory([first, second])
    first[1].register_buffer("sparse", torch.zeros(3).to_sparse())
    check_separate_memory([first, model()])
