"""Tests of cutting: arguments are split along their dims, as views in the caller's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_dataclass

from flowdp.data_parallel.cut import Arguments
from flowdp.data_parallel.layout import PLAIN, Callee, Layout
from tests.loops import numbers


@dataclass
class Pair:
    """A dataclass registered as a pytree."""

    ids: Tensor
    note: str


register_dataclass(Pair)


def forward(x: Any, mask: Any = None, *more: Any, **named: Any) -> None:
    """A module's forward, of which the parameters' names are wanted."""


def arguments(*args: Any, layout: Layout = PLAIN, **kwargs: Any) -> Arguments:
    return Arguments(layout, Callee(forward), args, kwargs)


# ---------------------------------------------------------------- the length of the batch
@pytest.mark.parametrize(
    ("args", "samples"),
    [
        ((), None),
        (("text", "more"), None),
        (({"scale": torch.tensor(1.0), "x": torch.ones(4, 2)},), 4),
        ((Pair(torch.arange(5), "n"),), 5),
        ((["a"], np.ones(3), torch.ones(2)), 2),
        ((["a"], np.ones(3)), 3),
        ((["a", "b"], [1, 2, 3]), 2),
        ((pack_sequence([torch.ones(2)]),), None),
    ],
)
def test_the_length_of_a_batch_is_that_of_its_first_tensor_that_has_one(args: Any, samples: Any) -> None:
    assert arguments(*args).samples == samples


@pytest.mark.parametrize(
    ("args", "dim", "found"),
    [
        ((numbers(4, 6),), 1, (6, 1)),
        ((numbers(4), numbers(4, 6)), 1, (6, 1)),
        ((numbers(4, 6), numbers(5, 3)), {"x": None}, (5, 0)),
        ((numbers(4, 6), numbers(5, 3)), {0: 1}, (6, 1)),
        ((1, 2, numbers(5, 3)), {2: 1}, (3, 1)),
    ],
)
def test_the_length_along_another_dim(args: Any, dim: Any, found: Any) -> None:
    made = arguments(*args, layout=Layout(dim))
    assert (made.samples, made.dim) == found


# ---------------------------------------------------------------- parts


def test_nothing_is_copied() -> None:
    x = numbers(5, 2)
    _, part = arguments(x).parts((2, 3))
    assert part.tensors[0].data_ptr() == x[2:].data_ptr()


@pytest.mark.parametrize("sizes", [(5,), (0, 5)])
def test_what_is_not_divided_is_the_callers_own(sizes: tuple[int, ...]) -> None:
    x, names = numbers(5, 2), [*"abcde"]
    (part,) = arguments(x, names=names).parts(sizes)
    assert part.args[0] is x
    assert part.kwargs["names"] is names
    assert part.samples == 5
    assert arguments(3).whole().samples == 0


# ---------------------------------------------------------------- lists of samples
def test_lists_with_an_entry_for_each_sample() -> None:
    images = [numbers(3, 4, size) for size in (5, 6, 7)]
    records = [{"boxes": numbers(count, 4)} for count in (3, 1, 2)]
    callee = Callee(forward)
    made = Arguments(PLAIN, callee, (images, records), {"names": ["a", "b", "c"], "k": 4, "size": (7, 8, 9)})
    assert made.samples == 3
    first, second = made.parts((1, 2))
    assert first.args == (images[:1], records[:1])
    assert first.kwargs == {"names": ["a"], "k": 4, "size": (7, 8, 9)}
    assert second.args == (images[1:], records[1:])
    assert callee.has_entries
    more = Arguments(PLAIN, callee, ([numbers(3, 2)] * 4,), {})
    assert more.samples == 4
    assert [part.samples for part in more.parts((1, 3))] == [1, 3]
    assert (
        Arguments(PLAIN, callee, (torch.stack(images[:1]),), {}).in_words((1,)).endswith("shape (1, 3, 4, 5)")
    )
