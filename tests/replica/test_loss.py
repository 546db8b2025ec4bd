"""Tests of the loss of a step over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from flowdp.graphs.base import Computed
from flowdp.replica.loss import RunningLoss, loss_function, unpack_loss


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


@pytest.mark.parametrize(
    ("result", "remedy"),
    [
        (None, "not NoneType: end it with `return loss`"),
        (0.5, "not float: leave .item() out"),
        ((torch.ones(()), torch.ones(2)), "not tuple of something else: return the loss alone"),
        ({"los": torch.ones(())}, "not a mapping with 'los'"),
    ],
)
def test_what_is_no_loss_is_told_what_to_return(result: object, remedy: str) -> None:
    with pytest.raises(TypeError) as caught:
        unpack_loss(result)
    assert remedy in str(caught.value)


def test_a_criterion_names_the_keys_of_a_batch_that_it_cannot_take() -> None:
    call = loss_function(nn.MSELoss(), torch.device("cpu"))
    with pytest.raises(TypeError, match=r"not dict\['x', 'label'\]; .*criterion\(model\(batch\['x'\]\)"):
        call(nn.Identity(), {"x": torch.ones(1), "label": torch.ones(1)})
    with pytest.raises(TypeError, match="not tuple; give a function"):
        call(nn.Identity(), (torch.ones(1),) * 3)
    for unlabelled in (torch.ones(2), [torch.ones(2)], (torch.ones(2),)):
        with pytest.raises(TypeError, match=r"this batch has no label: give a dataset of \(x, y\)$"):
            call(nn.Identity(), unlabelled)
