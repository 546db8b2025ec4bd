"""Tests of fingerprints: a checkpoint of another run is refused with the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flowdp.checkpoint.fingerprint import differences, fingerprint, orders
from flowdp.protocol.position import OpenEpoch, Position
from tests.data.opening import opened


def said(
    module: nn.Module | None = None,
    length: int | None = 100,
    kind: type[torch.optim.Optimizer] = torch.optim.Adam,
    **order: Any,
) -> dict[str, Any]:
    module = module or nn.Linear(2, 3)
    optimizers = [kind(module.parameters(), lr=0.1)]  # type: ignore[call-arg]
    return fingerprint(module, optimizers, dataset_length=length, **{"batch_size": 8, "seed": 0, **order})


def frozen() -> nn.Module:
    module = nn.Linear(2, 3)
    module.bias.requires_grad_(False)
    return module


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_buffer("count", torch.zeros(1), persistent=False)


def test_the_same_run_has_no_differences() -> None:
    assert differences(said(), said(), inside_epoch=True) == []
    assert differences(said(None, None), said(None, None), inside_epoch=True) == []


@pytest.mark.parametrize("inside_epoch", [True, False])
@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            said(nn.Linear(2, 4)),
            "another model: 'weight' is float32 (3, 2) in the checkpoint and float32 (4, 2)",
        ),
        (said(nn.Linear(2, 3).half()), "another model: 'weight' is float32 (3, 2)"),
        (
            said(frozen()),
            "another model: 'bias' is float32 (3,) in the checkpoint and float32 (3,) frozen here",
        ),
        (said(Counting()), "another model: 'count' is missing in the checkpoint and float32 (1,) buffer"),
        (said(nn.Sequential(*[nn.Linear(2, 3)] * 4)), "; and 5 more"),
        (said(length=99), "the dataset had 100 samples, it has 99 samples now"),
        (said(length=None), "the dataset had 100 samples, it has no length now"),
        (said(kind=torch.optim.SGD), "the optimizers were ['Adam'], they are ['SGD'] now"),
    ],
)
def test_another_model_or_dataset(now: dict[str, Any], expected: str, inside_epoch: bool) -> None:
    [found] = differences(said(), now, inside_epoch=inside_epoch)
    assert expected in found
    assert found.count("in the checkpoint and") <= 5


@pytest.mark.parametrize("change", [{"shuffle": False}, {"seed": 1}, {"window": 4}])
def test_the_order_matters_inside_an_epoch_alone(change: dict[str, Any]) -> None:
    [found] = differences(said(), said(**change), inside_epoch=True)
    [(name, value)] = change.items()
    assert found.startswith(f"{name} was ")
    assert f"it is {value!r} now" in found
    assert differences(said(), said(**change), inside_epoch=False) == []


def test_orders_are_those_of_the_epochs_of_which_a_part_is_trained() -> None:
    source = opened(DataLoader(range(6), 2, sampler=[5, 3, 1, 0]), epochs=9)
    for epoch in range(5):
        source.indices(epoch, 0)
    open_ = (
        OpenEpoch(1, 2, ((0, 1), ()), ()),
        OpenEpoch(2, 2, ((0,), ()), ()),
        OpenEpoch(3, 0, ((), ()), ()),
    )
    assert orders(source, Position(2, 1, open_)) == {2: source.checksum(2)}
    own = opened(range(6), 2, epochs=9)
    own.indices(2, 0)
    assert orders(own, Position(2, 1, open_)) == {}
