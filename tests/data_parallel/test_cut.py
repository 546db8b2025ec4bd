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
from tests.loops import assert_equal, numbers


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
def test_what_has_the_batchs_length_is_cut_and_everything_else_goes_whole() -> None:
    x, ids, mask = numbers(5, 2), torch.arange(5), torch.ones(3, 5, dtype=torch.bool)
    scale, other, array = torch.tensor(2.0), object(), np.arange(10).reshape(5, 2)
    made = arguments(
        {"x": x, "more": (ids, [mask, None])}, Pair(ids, "note"), scale=scale, other=other, k=5, array=array
    )
    first, part, last = made.parts((1, 0, 3, 1))
    assert [one.samples for one in (first, part, last)] == [1, 3, 1]
    fields, pair = part.args
    assert torch.equal(fields["x"], x[1:4])
    assert fields["more"][0].tolist() == pair.ids.tolist() == [1, 2, 3]
    assert fields["more"][1] == [mask, None]
    assert pair.note == "note"
    assert part.kwargs["other"] is other
    assert part.kwargs["scale"] is scale
    assert (part.kwargs["k"], part.kwargs["array"].tolist()) == (5, array[1:4].tolist())
    assert [tuple(tensor.shape) for tensor in part.tensors] == [(3, 2), (3,), (3, 5), (3,), ()]
    assert part.tensors[2] is mask


def test_nothing_is_copied() -> None:
    x = numbers(5, 2)
    _, part = arguments(x).parts((2, 3))
    assert part.tensors[0].data_ptr() == x[2:].data_ptr()


def test_gradients_of_all_parts_come_together() -> None:
    x, whole = numbers(2, 4).requires_grad_(), torch.ones(3, requires_grad=True)
    parts = arguments(x * 2, whole=whole, layout=Layout({"x": 1})).parts((1, 3))
    sum(part.tensors[0].sum() * (k + 1) + part.tensors[1].sum() for k, part in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert_equal([x.grad, whole.grad], [torch.tensor([[2.0, 4, 4, 4]] * 2).double(), torch.full((3,), 2.0)])
    with torch.no_grad():
        assert arguments(x).parts((1, 1))[0].tensors[0].grad_fn is None


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
