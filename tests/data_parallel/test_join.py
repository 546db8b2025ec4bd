"""Tests of joining: outputs are joined along their dims, in the caller's graph, and others are an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from flowdp.data_parallel.join import _masked_mean, join
from flowdp.data_parallel.layout import PLAIN, Layout
from flowdp.errors import FlowdpError


@dataclass
class Pair:
    """A dataclass registered as a pytree."""

    ids: Tensor
    note: str


register_dataclass(Pair)


@dataclass
class Plain:
    """A dataclass that is not registered."""

    ids: Tensor


class Named(NamedTuple):
    out: Any
    note: Any


def count(mask: Tensor) -> Tensor:
    """A function for `reduce`."""
    return mask.sum()


COUNTED = Layout(reduce=count)


def asking(*values: float) -> list[Tensor]:
    return [torch.tensor(value, requires_grad=True) for value in values]


# ---------------------------------------------------------------- rows and values
def test_tensors_are_joined_and_the_rest_is_kept() -> None:
    def output(start: int, samples: int) -> Any:
        ids = torch.arange(start, start + samples)
        return Named({"ids": ids, "twice": ids.repeat_interleave(2)}, (Pair(ids, "n"), None, 3.0, "text"))

    tree = join([output(0, 2), output(2, 1), output(3, 3)], (2, 1, 3), PLAIN)
    assert isinstance(tree, Named)
    assert tree.out["ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.out["twice"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert tree.note[0].ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.note[0].note == "n"
    assert tree.note[1:] == (None, 3.0, "text")


def test_one_part_stays_as_it_is() -> None:
    tree = {"any": torch.ones(7, 2), "count": torch.tensor(3), "plain": Plain(torch.ones(1))}
    assert join([tree], (4,), Layout(join=lambda outputs, sizes: None)) is tree


def test_each_part_gets_its_piece_of_the_gradient() -> None:
    first, second = asking(0.0), asking(0.0)
    rows, other = torch.zeros(2, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    joined = join([(rows, first[0], torch.ones(2)), (other, second[0], torch.ones(1))], (2, 1), PLAIN)
    assert not joined[2].requires_grad
    (joined[0] * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    joined[1].backward(torch.tensor(3.0))
    assert rows.grad is not None
    assert other.grad is not None
    assert [*rows.grad.flatten(), *other.grad.flatten()] == [1, 2, 3]
    assert [first[0].grad, second[0].grad] == [2, 1]


# ---------------------------------------------------------------- numbers
def test_numbers_are_averaged_by_samples() -> None:
    one, other = asking(1.0, 5.0)
    mean = join([one, other], (3, 1), PLAIN)
    mean.backward()
    assert (mean.item(), mean.shape) == (2.0, ())
    assert [one.grad, other.grad] == [0.75, 0.25]
    half = [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(5.0, dtype=torch.bfloat16)]
    assert join(half, (3, 1), PLAIN).dtype == torch.bfloat16


def test_a_part_without_anything_to_count_gives_nothing_on_a_device() -> None:
    one, other = asking(float("nan"), 5.0)
    for weights, value, gradients in (((0, 2), 5.0, [0.0, 1.0]), ((2, 2), None, [0.5, 0.5])):
        one.grad = other.grad = None
        mean = _masked_mean([one, other], torch.tensor(weights).double(), (5, 5))
        mean.backward()
        assert mean.dtype == torch.float32
        assert mean.isnan() if value is None else mean == value
        assert [one.grad, other.grad] == gradients
    assert _masked_mean(asking(1.0, 5.0), torch.zeros(2).double(), (1, 3)) == 4.0


def test_weights_that_are_none() -> None:
    for weights in ([{}, {}], ()):
        with pytest.raises(FlowdpError, match=r"a function of mask, and the call has no such arguments$"):
            join(asking(1.0, 2.0), (1, 1), COUNTED, weights=weights)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            torch.ones(2, 3),
            torch.ones(1, 4),
            r"output cannot be gathered: for \[2, 1\] samples .*\(2, 3\), \(1, 4\)",
        ),
        (torch.ones(1), torch.ones(1), r"averaged: loss.mean\(\), loss.squeeze\(\)"),
        ({"n": torch.tensor(3)}, {"n": torch.tensor(3)}, r"output\['n'\] .*one number of torch.int64"),
        ({"a": torch.ones(2)}, {"b": torch.ones(1)}, "part 1 returned .*'a'.* part 2 .*'b'"),
        ((torch.ones(2), 1), (torch.ones(1), 2), r"output\[1\] .*differs between the devices: \[1, 2\]"),
        (np.ones(2), np.ones(2), "it is no tensor, and differs"),
    ],
)
def test_what_cannot_be_gathered(one: Any, other: Any, message: str) -> None:
    with pytest.raises(FlowdpError, match=message):
        join([one, other], (2, 1), PLAIN)
