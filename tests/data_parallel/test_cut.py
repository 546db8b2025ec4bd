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

from flowdp.data_parallel.cut import Arguments, Part
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
        (("text", 3, None), None),
        (("text", "more"), None),
        ((torch.tensor(1.0),), None),
        (({"scale": torch.tensor(1.0), "x": torch.ones(4, 2)},), 4),
        ((torch.ones(0, 2), torch.ones(3)), 0),
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
        ((numbers(4),), 1, (None, 0)),
        ((np.ones((4, 6)), ["a"]), 1, (6, 1)),
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


def test_columns_are_cut_and_sizes_are_not() -> None:
    (part, _) = arguments(numbers(2, 3), ["a", "b"], (7, 8), words=("c", "d"), three=[1, 2, 3]).parts((1, 1))
    assert part.args[1:] == (["a"], (7, 8))
    assert part.kwargs == {"words": ("c",), "three": [1, 2, 3]}


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


@pytest.mark.parametrize("sizes", [(5,), (0, 5), (0, 0)])
def test_what_is_not_divided_is_the_callers_own(sizes: tuple[int, ...]) -> None:
    x, names = numbers(5, 2), [*"abcde"]
    (part,) = arguments(x, names=names).parts(sizes)
    assert part.args[0] is x
    assert part.kwargs["names"] is names
    assert part.samples == 5
    assert arguments(3).whole().samples == 0


def test_other_tensors_in_the_places_of_a_part() -> None:
    layout = Layout(reduce=lambda names: len(names))
    made = arguments({"x": numbers(4, 2), "k": 3}, [numbers(3)], names=[*"abcd"], layout=layout)
    _, part = made.parts((2, 2))
    assert part.weights
    mine = [torch.ones(2, 2), torch.zeros(3)]
    other = part.replaced(mine)
    assert all(one is wanted for one, wanted in zip([other.args[0]["x"], *other.args[1]], mine, strict=True))
    assert (other.args[0]["k"], other.kwargs["names"], other.samples) == (3, ["c", "d"], 2)
    assert other.weights == part.weights
    assert part.tensors[0] is part.args[0]["x"], "the part is as it was"
    assert Part((("a",), {"b": 2}), 0, 0).replaced([]).args == ("a",)


def test_a_split_of_the_users_own() -> None:
    def split(args: Any, kwargs: Any, sizes: tuple[int, ...]) -> Any:
        return [([args[0][place::2]], kwargs) for place in range(len(sizes))]

    x, whole = numbers(4, 2), numbers(3)
    made = arguments(x, whole=whole, layout=Layout(split=split))
    first, second = made.parts((2, 0, 2))
    assert_equal([first.args[0], second.args[0]], [x[::2], x[1::2]])
    assert first.tensors[1] is whole
    wrong = arguments(x, layout=Layout(split=lambda args, kwargs, sizes: [((x,), {})]))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        wrong.parts((1, 3))


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


@pytest.mark.parametrize(
    ("args", "dim"),
    [
        ((numbers(2, 3), [{"boxes": numbers(4, 4)}] * 2), 0),  # a tensor has the batch
        (([numbers(3, 2)] * 2,), 0),  # two inputs of three samples
        (([numbers(3, 2)] * 2, [numbers(3, 2), numbers(5, 2)]), 0),
        (([numbers(3, 2)] * 2, [{"x": numbers(4)}] * 3), 0),
        (([numbers(3, 2)] * 2, {"x": numbers(4)}), 0),
        (([numbers(3, 3)] * 2, [{"x": numbers(4, 3)}] * 2), 1),
        (([numbers(3, 2)] * 2, [{"x": numbers(4)}] * 2), {"mask": None}),
    ],
)
def test_lists_that_may_be_anything_else(args: Any, dim: Any) -> None:
    made = arguments(*args, layout=Layout(dim))
    assert made.samples == (2 if isinstance(args[0], Tensor) else 3)


# ---------------------------------------------------------------- patterns
def test_a_pattern_tells_what_is_cut() -> None:
    x, mask, one = numbers(4, 2), numbers(3, 3), numbers(1, 3)

    def pattern(mask: Any, names: Any = ("a", "b"), ids: Any = (*"abcd",), **more: Any) -> Any:
        return arguments(x, {"mask": mask, "one": one}, names=names, ids=ids, **more).pattern

    same = pattern(mask)
    assert hash(pattern(mask * 2, ("c", "d", "e"), (*"efgh",))) == hash(same)
    assert pattern(mask * 2, ("c", "d", "e"), (*"efgh",)) == same
    assert pattern(numbers(5, 3)) == same, "of another length, and whole as before"
    assert pattern(numbers(4, 3)) != same
    assert pattern(mask, (*"abcd",)) != same
    assert pattern(mask, labels=None) != same
    assert arguments(x, mask).pattern == arguments(x, mask=mask).pattern == arguments(x=x, mask=mask).pattern


# ---------------------------------------------------------------- what cannot be cut
# ---------------------------------------------------------------- weights
def test_weights_of_a_part() -> None:
    def count(mask: Tensor) -> Tensor:
        return mask.sum()

    def tokens(tokens: Tensor) -> int:
        return len(tokens)

    made = arguments(
        numbers(4, 2),
        torch.tensor([1, 0, 0, 1]),
        labels=None,
        layout=Layout(reduce={"loss": count, "more": tokens, "kl": "sum"}),
    )
    parts = made.parts((1, 3))
    assert [part.weights for part in parts] == [{count: 1}] * 2
    assert [part.weights[count].dtype for part in parts] == [torch.float64] * 2
    assert arguments(numbers(4), numbers(4)).whole().weights == {}


# ---------------------------------------------------------------- words
def test_the_cut_in_words() -> None:
    made = arguments(numbers(8, 4))
    assert made.in_words((4, 0, 4)) == "8 samples as 4 + 4, along dim 0 of 'x' of shape (8, 4)"
    made = arguments(1, 2, numbers(4, 8), layout=Layout(1))
    assert made.in_words((5, 3)) == "8 samples as 5 + 3, along dim 1 of 2 of shape (4, 8)"
    assert arguments([*"ab"]).in_words((1, 1)) == "2 samples as 1 + 1"


def test_the_arguments_in_words() -> None:
    assert arguments().described() == "no arguments"
    made = arguments({"x": numbers(4, 2)}, 3, names=[*"abcd"])
    assert made.described() == "0['x']: tensor (4, 2), 1: 3, 'names': list of 4"
    assert len(arguments([numbers(2)] * 300).described()) == 1000
