"""Tests of the context of a loss: the model's arguments, and the records of the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.data_parallel.loss_context import Inputs
from flowdp.errors import OptionError
from tests.loops import mlp

BATCH = {"image": torch.ones(2), "mask": torch.zeros(2), "label": torch.arange(2)}
PAIR = (torch.ones(2), torch.zeros(2), torch.arange(2))


class Masked(nn.Module):
    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return image * mask


def same(found: Any, *wanted: Tensor) -> bool:
    args, kwargs = found
    return not kwargs and len(args) == len(wanted) and all(map(torch.equal, args, wanted))


def test_fields_by_key_and_by_position() -> None:
    assert same(Inputs("mask", Masked()).of(BATCH), BATCH["mask"])
    assert same(Inputs(["mask", "image"], Masked()).of(BATCH), BATCH["mask"], BATCH["image"])
    assert same(Inputs((0, 1), Masked()).of(PAIR), PAIR[0], PAIR[1])
    assert same(Inputs(1, Masked()).of(list(PAIR)), PAIR[1])


def test_without_fields_the_batch_or_its_first() -> None:
    inputs = Inputs(None, mlp())
    assert same(inputs.of(PAIR), PAIR[0])
    assert same(inputs.of([PAIR[1], PAIR[2]]), PAIR[1])
    assert same(inputs.of(PAIR[2]), PAIR[2])


def test_of_a_mapping_what_forward_has_parameters_for() -> None:
    args, kwargs = Inputs(None, Masked()).of(BATCH)
    assert args == ()
    assert kwargs["image"] is BATCH["image"]
    assert kwargs["mask"] is BATCH["mask"]
    assert len(kwargs) == 2


def test_a_function_of_the_batch() -> None:
    assert same(Inputs(lambda batch: batch["mask"] + 1, Masked()).of(BATCH), torch.ones(2))
    assert same(Inputs(lambda batch: (batch[1], batch[0]), Masked()).of(PAIR), PAIR[1], PAIR[0])


def test_fields_that_a_batch_does_not_have() -> None:
    with pytest.raises(KeyError, match="pixels"):
        Inputs(["image", "pixels"], Masked()).of(BATCH)
    with pytest.raises(OptionError, match="at least one"):
        Inputs([], Masked())
