"""Tests of outputs of several batches as one; tests/test_inference.py has whole predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.engine.predictor import _check, forward_step, joined
from flowdp.errors import DataError

A, B = torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2) + 10


def test_tensors_of_one_form_are_concatenated() -> None:
    assert torch.equal(joined([(A, 3), (B, 2)]), torch.cat([A, B]))
    both = joined([({"x": A, "y": (A[:, 0],)}, 3), ({"x": B, "y": (B[:, 0],)}, 2)])
    assert both.keys() == {"x", "y"}
    assert torch.equal(both["y"][0], torch.cat([A, B])[:, 0])


def test_tensors_that_do_not_fit_are_a_list_of_the_samples() -> None:
    found = joined([(A, 3), (torch.zeros(2, 5), 2)])
    assert [tuple(one.shape) for one in found] == [(2,)] * 3 + [(5,)] * 2
    pairs = joined([((A, A[:, 0]), 3), ((torch.zeros(1, 5), torch.ones(1)), 1)])
    assert isinstance(pairs[3], tuple)
    assert pairs[2][1] == A[2, 0]
    assert joined([(A, 3), (B.double(), 2)])[4].dtype is torch.float64


def test_a_list_as_long_as_the_batch_has_an_entry_for_each_sample() -> None:
    boxes = [[{"boxes": torch.full((2, 4), float(i))} for i in range(2)] for _ in range(2)]
    found = joined([(boxes[0], 2), (boxes[1], 2)])  # as many boxes as samples, by chance
    assert [one["boxes"][0, 0].item() for one in found] == [0, 1, 0, 1]
    assert joined([(["a", "b"], 2), (["c"], 1)]) == ["a", "b", "c"]
    assert joined([({"text": ["a", "b"], "x": B}, 2)])["text"] == ["a", "b"]
    levels = joined([([A, A], 3), ([B, B], 2)])  # of one batch alone as long as it
    assert len(levels) == 2
    assert torch.equal(levels[1], torch.cat([A, B]))


def test_no_batch() -> None:
    with pytest.raises(DataError, match="there is no sample to predict"):
        joined([])


@pytest.mark.parametrize("output", [torch.zeros(()), torch.zeros(4, 3), {"loss": torch.zeros(())}, None, {}])
def test_an_output_without_an_entry_for_each_sample(output: object) -> None:
    with pytest.raises(TypeError, match=r"an entry for each of the batch's 3 samples.*give predict\(dataset"):
        _check(output, 3)


def test_the_forward_is_the_step_where_none_is_given() -> None:
    model = nn.Identity()
    for has_criterion in (False, True):
        step: Any = forward_step(has_criterion)
        assert step(model, A) is A
        assert step(model, (A,)) is A
    assert step(model, [A, B]) is A
    for batch, named in (((A, B), "tuple of 2"), ({"x": A}, "dict of 1"), (3, "int")):
        with pytest.raises(TypeError, match=f"a batch here is a {named}, and without a step"):
            forward_step(False)(model, batch)
    assert isinstance(step(model, A), Tensor)
