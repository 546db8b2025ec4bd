"""Tests of gathering: outputs are joined along dim 0, and others are an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_dataclass

from flowdp.data_parallel.gather import Outputs, PartOutputs, join
from flowdp.errors import FlowdpError
from tests.loops import CPU


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


class Opaque:
    """A class of an unknown kind."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids


class Named(NamedTuple):
    out: Any
    note: Any


def returned(*trees: Any, samples: tuple[int, ...]) -> list[PartOutputs]:
    return [PartOutputs(tree, count, CPU) for tree, count in zip(trees, samples, strict=True)]


def joined(*trees: Any, samples: tuple[int, ...]) -> Outputs:
    parts = returned(*trees, samples=samples)
    return join(parts, [[tensor.detach() for tensor in part.tensors] for part in parts])


def tree_of(outputs: Outputs) -> Any:
    return outputs.tree(outputs.tensors)


def test_tensors_are_joined_and_the_rest_is_kept() -> None:
    def output(start: int, samples: int) -> Any:
        ids = torch.arange(start, start + samples)
        return Named({"ids": ids, "twice": ids.repeat_interleave(2)}, (Pair(ids, "n"), None, 3.0, "text"))

    tree = tree_of(joined(output(0, 2), output(2, 1), output(3, 3), samples=(2, 1, 3)))
    assert isinstance(tree, Named)
    assert tree.out["ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.out["twice"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert tree.note[0].ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.note[0].note == "n"
    assert tree.note[1:] == (None, 3.0, "text")


def test_numbers_are_averaged_by_samples() -> None:
    tree = tree_of(joined(torch.tensor(1.0), torch.tensor(5.0), samples=(3, 1)))
    assert tree.item() == pytest.approx(2.0)
    assert tree.shape == ()


def test_one_part_stays_as_it_is() -> None:
    tree = {"any": torch.ones(7, 2), "count": torch.tensor(3), "plain": Plain(torch.ones(1))}
    outputs = joined(tree, samples=(4,))
    found = tree_of(outputs)
    assert found["any"].shape == (7, 2)
    assert found["count"].item() == 3
    assert found["plain"].ids.tolist() == [1.0]
    gradient = torch.ones(7, 2)
    assert outputs.part([gradient, None, None], 0) == [gradient, None, None]


def test_each_part_gets_its_piece_of_the_gradient() -> None:
    outputs = joined(
        (torch.zeros(2, 1), torch.zeros(4), torch.tensor(0.0)),
        (torch.zeros(1, 1), torch.zeros(2), torch.tensor(0.0)),
        samples=(2, 1),
    )
    given = [torch.tensor([[1.0], [2.0], [3.0]]), torch.arange(6.0), torch.tensor(3.0)]
    first, second = outputs.part(given, 0), outputs.part(given, 1)
    assert [g.tolist() for g in first if g is not None] == [[[1.0], [2.0]], [0, 1, 2, 3], 2.0]
    assert [g.tolist() for g in second if g is not None] == [[[3.0]], [4, 5], 1.0]
    assert outputs.part([None, None, None], 1) == [None, None, None]


def test_which_outputs_ask_for_a_gradient() -> None:
    asking, other = torch.ones(1, requires_grad=True), torch.ones(1)
    assert joined((asking, other), (other, other), samples=(1, 1)).differentiable == [True, False]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            torch.ones(2, 3),
            torch.ones(1, 4),
            r"output cannot be gathered: for \[2, 1\] samples .*\(2, 3\), \(1, 4\)",
        ),
        (torch.ones(3), torch.ones(3), r"for \[2, 1\] samples .*\(3,\), \(3,\)"),
        (torch.ones(2), torch.tensor(1.0), r"\(2,\), \(\)"),
        (torch.ones(0), torch.ones(0), r"\(0,\), \(0,\)"),
        ({"n": torch.tensor(3)}, {"n": torch.tensor(3)}, r"output\['n'\] .*one number of torch.int64"),
        ({"a": torch.ones(2)}, {"b": torch.ones(1)}, "cpu returned .*'a'.*'b'"),
        ((torch.ones(2), 1), (torch.ones(1), 2), r"output\[1\] .*differs between the devices: \[1, 2\]"),
        ((1,), (True,), "differs between the devices"),
        (np.ones(2), np.ones(2), "it is no tensor, and differs"),
        (Opaque(torch.ones(2)), Opaque(torch.ones(1)), "classes that torch knows as pytrees"),
        (
            pack_sequence([torch.ones(2)] * 2),
            pack_sequence([torch.ones(2)]),
            "PackedSequence; return the padded",
        ),
        ({"loss": 0.5}, {"loss": 0.25}, r"output\['loss'\]"),
        (torch.ones(2), 1.0, r"differs between the devices: \[a tensor, 1.0\]"),
        (1.0, torch.ones(2), "it is no tensor, and differs"),
    ],
)
def test_what_cannot_be_gathered(one: Any, other: Any, message: str) -> None:
    with pytest.raises(FlowdpError, match=message):
        joined(one, other, samples=(2, 1))


def test_the_memory_format_is_kept() -> None:
    images = torch.ones(3, 2, 4, 4).to(memory_format=torch.channels_last)
    tree = tree_of(joined(images[:2], images[2:], samples=(2, 1)))
    assert tree.is_contiguous(memory_format=torch.channels_last)
