"""Tests of comparing outputs: equal up to rounding, or a message with the difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowdp.modules.comparison import compare, is_close
from tests.loops import numbers

SINGLE = torch.finfo(torch.float32).eps
HALF = torch.finfo(torch.bfloat16).eps
DOUBLE = torch.finfo(torch.float64).eps

x = numbers(8, 4)
strange = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])


@pytest.mark.parametrize(
    ("whole", "joined", "epsilon"),
    [
        (x, x * (1 + 1e-12), DOUBLE),
        (x.float(), x.float() * (1 + 1e-5), SINGLE),
        (x.bfloat16(), (x * 1.01).bfloat16(), HALF),
        (torch.tensor(2.0), torch.tensor(2.000002), SINGLE),
        (torch.tensor(1e-9), torch.tensor(-1e-9), SINGLE),  # a sum that cancels
        (strange, strange.clone(), SINGLE),
        (torch.arange(100), torch.arange(100).index_fill(0, torch.tensor(7), 3), SINGLE),  # a tie
        (torch.tensor(40), torch.tensor(41), SINGLE),
        ({"n": 3, "t": "text", "f": float("nan")}, {"n": 3, "t": "text", "f": float("nan")}, SINGLE),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), SINGLE),
        (x.to(torch.complex128), x * (1 + 1e-12), DOUBLE),
    ],
)
def test_rounding_is_no_difference(whole: Any, joined: Any, epsilon: float) -> None:
    assert compare(whole, joined, epsilon) == []


@pytest.mark.parametrize(
    ("whole", "joined", "epsilon", "text"),
    [
        (x, x * (1 + 1e-6), DOUBLE, "differs by up to"),
        (x.float(), x.float() * 1.001, SINGLE, "differs by up to"),
        (x.bfloat16(), (x * 1.3).bfloat16(), HALF, "differs by up to"),
        (
            torch.tensor(2.0),
            torch.tensor(2.0001),
            SINGLE,
            "is 2 for the whole batch, and 2.0001 for its parts",
        ),
        (strange, strange.flip(0), SINGLE, "is finite at other places"),
        (torch.ones(8), torch.ones(8, 1), SINGLE, r"has shape (8,) for the whole batch, and (8, 1)"),
        (torch.arange(100), torch.arange(100).flip(0), SINGLE, "differs at 100 of 100 places"),
        (torch.tensor(40), torch.tensor(20), SINGLE, "is 40 for the whole batch, and 20 for its parts"),
        (8, 4, SINGLE, "output is 8 for the whole batch, and 4 for its parts"),
        ([x, x], [x], SINGLE, "the whole batch gives list(*, *), its parts list(*)"),
        (np.arange(3), np.arange(2), SINGLE, "for the whole batch, and"),
    ],
)
def test_differences_have_words(whole: Any, joined: Any, epsilon: float, text: str) -> None:
    (found,) = compare(whole, joined, epsilon)
    assert text in found


def test_differences_have_a_place() -> None:
    whole = {"loss": torch.tensor(1.0), "rows": x, "n": torch.tensor(9)}
    joined = {"loss": torch.tensor(2.0), "rows": x + 1, "n": torch.tensor(3)}
    found = compare(whole, joined, SINGLE)
    assert [text.split()[0] for text in found] == ["output['loss']", "output['rows']", "output['n']"]
    assert is_close(torch.tensor(1.0), torch.tensor(1.000001), SINGLE)
