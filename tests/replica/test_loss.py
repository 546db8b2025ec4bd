"""Tests of the loss of a step over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flowdp.graphs.base import Computed
from flowdp.replica.loss import RunningLoss


def of(loss: float, weight: float | None = None) -> Computed:
    named = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    return Computed(torch.tensor(loss), named)


@pytest.mark.parametrize(
    ("micro_batches", "factor", "loss", "of_gradients", "weight"),
    [
        ([of(1.0), of(2.0)], 1.0, 3.0, 1.0, None),
        ([of(1.0), of(2.0)], 0.5, 1.5, 0.5, None),
        ([of(6.0, 2.0), of(3.0, 1.0)], 0.5, 3.0, 1 / 3, 1.5),
        ([of(6.0, 2.0), of(1.0)], 1.0, 2.8, 0.4, 2.5),  # one that names no weight counts by its samples
        ([of(0.0, 0.0)], 1.0, 0.0, 1.0, 0.0),  # a mean over nothing
    ],
)
def test_the_mean_of_a_step(
    micro_batches: Sequence[Computed], factor: float, loss: float, of_gradients: float, weight: float | None
) -> None:
    running = RunningLoss()
    for micro_batch in micro_batches:
        running.add(micro_batch, 0.5)
    value, scale = running.end(factor)
    assert isinstance(value, Tensor)
    assert value.item() == pytest.approx(loss)
    assert float(scale) == pytest.approx(of_gradients)
    assert (None if running.step_weight is None else running.step_weight.item()) == weight
    assert running.end(1.0) == (None, 1.0)
    assert running.step_weight is None
