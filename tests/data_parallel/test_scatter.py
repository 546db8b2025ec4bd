"""Tests of scattering: arguments are split along dim 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from flowdp.data.trees import batch_length
from flowdp.data_parallel.scatter import Arguments
from tests.loops import CPU, numbers


@dataclass
class Pair:
    """A dataclass registered as a pytree."""

    ids: Tensor
    note: str


register_dataclass(Pair)


@pytest.mark.parametrize(
    ("tree", "length"),
    [
        ((), None),
        (("text", 3, None), None),
        ((torch.tensor(1.0),), None),
        (({"scale": torch.tensor(1.0), "x": torch.ones(4, 2)},), 4),
        ((torch.ones(0, 2), torch.ones(3)), 0),
        ((Pair(torch.arange(5), "n"),), 5),
    ],
)
def test_the_length_of_a_batch_is_that_of_its_first_tensor_that_has_one(
    tree: Any, length: int | None
) -> None:
    assert batch_length(tree) == length
    assert Arguments(tree).samples == length


def test_what_has_the_batchs_length_is_cut_and_everything_else_goes_whole() -> None:
    x, ids, mask = numbers(5, 2), torch.arange(5), torch.ones(3, 5, dtype=torch.bool)
    scale, other = torch.tensor(2.0), object()
    arguments = Arguments(
        ({"x": x, "more": (ids, [mask, None])}, Pair(ids, "note")), {"scale": scale, "other": other, "k": 5}
    )
    part = arguments.part(1, 3, CPU)
    fields, pair = part.args
    assert torch.equal(fields["x"], x[1:4])
    assert fields["more"][0].tolist() == pair.ids.tolist() == [1, 2, 3]
    assert fields["more"][0].dtype == torch.int64
    assert torch.equal(fields["more"][1][0], mask)
    assert fields["more"][1][1] is None
    assert pair.note == "note"
    assert part.kwargs["other"] is other
    assert (part.kwargs["scale"], part.kwargs["k"]) == (scale, 5)
    assert part.wanting == []


def test_nothing_is_copied_where_it_lies() -> None:
    x = numbers(5, 2)
    for device in (CPU, None):
        assert Arguments((x,)).part(2, 3, device).args[0].data_ptr() == x[2:].data_ptr()


def test_tensors_that_ask_for_a_gradient_become_leaves_of_the_devices_graph() -> None:
    x, whole, ids = numbers(4, 2).requires_grad_(), torch.ones(3).requires_grad_() * 2, torch.arange(4)
    arguments = Arguments((x, ids), {"whole": whole})
    assert [leaf is tensor for leaf, tensor in zip(arguments.wanting, (x, whole), strict=True)] == [
        True,
        True,
    ]
    part = arguments.part(0, 2, CPU)
    assert [leaf.shape for leaf in part.wanting] == [(2, 2), (3,)]
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in part.wanting)
    assert [part.args[0].data_ptr(), part.kwargs["whole"].data_ptr()] == [x.data_ptr(), whole.data_ptr()]
    assert not part.args[0].is_leaf, "or a module could not write to it"
    with torch.no_grad():
        assert Arguments((x,)).wanting == []
        assert not Arguments((x,)).part(0, 2, CPU).args[0].requires_grad


def test_gradients_are_put_together_for_what_was_cut_and_summed_for_what_went_whole() -> None:
    x, whole = numbers(4, 2).requires_grad_(), torch.ones(3, requires_grad=True)
    arguments = Arguments((x, whole))
    pieces = [[torch.ones(1, 2), torch.ones(3)], [None, torch.ones(3)], [torch.ones(2, 2) * 3, None]]
    cut, summed = arguments.join_gradients(pieces, [1, 1, 2])
    assert cut is not None
    assert summed is not None
    assert cut[:, 0].tolist() == [1, 0, 3, 3]
    assert summed.tolist() == [2, 2, 2]
    assert arguments.join_gradients([[None, None], [None, None]], [1, 3]) == [None, None]


def test_how_leaves_are_given() -> None:
    x, mask, one = numbers(4, 2), numbers(3, 3), numbers(1, 3)
    arguments = Arguments((x, {"mask": mask, "one": one}), {"names": ["a", "b"], "ids": [*"abcd"], "k": 4})
    assert arguments.ways() == {(0,): None, (1, "mask"): 3, ("names",): 2, ("ids",): None}
    assert (
        arguments.pattern
        == Arguments(
            (x + 1, {"mask": mask * 2, "one": one}), {"names": ["c", "d"], "ids": [*"abcd"], "k": 5}
        ).pattern
    )
    for other in (numbers(4, 3), numbers(5, 3)):
        more = Arguments((x, {"mask": other, "one": one}), {"names": ["a", "b"], "ids": [*"abcd"], "k": 4})
        assert more.pattern != arguments.pattern
    assert Arguments((x, mask), None, [0, None]).ways() == {(0,): None}
    assert Arguments((x.to_sparse(), mask)).sparse == (0,)


def test_lists_with_an_entry_for_each_sample() -> None:
    images = [numbers(3, 4, size) for size in (5, 6)]
    records = [{"boxes": numbers(count, 4)} for count in (3, 1)]
    arguments = Arguments((images, records), {"names": ["a", "b"], "k": 4, "size": (7, 8)})
    assert (arguments.samples, arguments.listed) == (2, {0, 1, "names"})
    first, second = arguments.apart((images, records), {"names": ["a", "b"], "k": 4}, (1, 1))
    assert first == ((images[:1], records[:1]), {"names": ["a"], "k": 4})
    assert second == ((images[1:], records[1:]), {"names": ["b"], "k": 4})


@pytest.mark.parametrize(
    ("args", "dims"),
    [
        ((numbers(2, 3), [{"boxes": numbers(4, 4)}] * 2), 0),  # a tensor has the batch
        (([numbers(3, 2)] * 2,), 0),  # two inputs of three samples
        (([numbers(3, 2)] * 2, [numbers(3, 2), numbers(5, 2)]), 0),
        (([numbers(3, 2)] * 2, [{"x": numbers(3)}] * 2), 0),  # all can be split
        (([numbers(3, 2)] * 2, [{"x": numbers(4)}] * 3), 0),
        (([numbers(3, 2)] * 2, {"x": numbers(4)}), 0),
        (([numbers(3, 3)] * 2, [{"x": numbers(4, 3)}] * 2), 1),
        (([numbers(3, 2)] * 2, [{"x": numbers(4)}] * 2), [0, None]),
    ],
)
def test_lists_that_may_be_anything_else(args: Any, dims: Any) -> None:
    assert not Arguments(args, dims=dims).listed


def test_lists_that_are_known_to_have_an_entry_for_each_sample() -> None:
    images = [numbers(3, 2)] * 4
    assert Arguments((images,), has_entries=True).samples == 4
    assert Arguments((torch.stack(images),), has_entries=True).listed == frozenset()
