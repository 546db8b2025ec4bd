"""Tests of batch sizes: those of the source, and the batches per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flowdp.errors import OptionError
from flowdp.replica.batch_sizes import Sizes, plan_sizes

DATA = TensorDataset(torch.ones(20, 1))


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "expected"),
    [
        (8, 1, Sizes(8, (1, 1))),
        ([8, 8], 1, Sizes(8, (1, 1))),
        (8, 3, Sizes(8, (1, 1), (3, 3))),
        ((64, 32), 1, Sizes(32, (2, 1), (2, 1))),
        ((6, 4), 1, Sizes(2, (3, 2), (3, 2))),
        ((6, 4), 2, Sizes(2, (3, 2), (6, 4))),
        ((7, 5), 1, Sizes(1, (7, 5), (7, 5))),
    ],
)
def test_what_the_ranks_take(batch_size: Any, accumulation: int, expected: Sizes) -> None:
    assert plan_sizes(DATA, batch_size, None, accumulation, "cadence", 2) == expected


@pytest.mark.parametrize(
    ("batch_size", "window", "expected"),
    [
        (8, None, Sizes(16, (1, 1), None, 16, (8, 8))),
        (8, 100, Sizes(100, (1, 1), None, 100, (8, 8))),
        ((6, 4), None, Sizes(10, (1, 1), None, 10, (6, 4))),
    ],
)
def test_what_a_window_is(batch_size: Any, window: int | None, expected: Sizes) -> None:
    assert plan_sizes(DATA, batch_size, window, 1, "exact", 2) == expected


def test_of_a_loader() -> None:
    loader = DataLoader(DATA, 5)
    assert plan_sizes(loader, None, None, 1, "sync", 2) == Sizes(None, (1, 1))
    assert plan_sizes(loader, None, None, 2, "sync", 2) == Sizes(None, (1, 1), (2, 2))
    assert plan_sizes(loader, None, None, 1, "exact", 2) == Sizes(10, (1, 1), None, 10, (5, 5))
    unsized: DataLoader[Any] = DataLoader(DATA, batch_size=None)
    assert plan_sizes(unsized, None, None, 1, "sync", 2) == Sizes(None, (1, 1))


@pytest.mark.parametrize(
    ("groups", "policy", "batches", "steps"),
    [
        (None, "cadence", 7, 7),
        ((1, 1), "cadence", 7, 7),
        ((3, 3), "cadence", 7, 3),
        ((2, 1), "sync", 7, 5),
        ((2, 1), "sync", 6, 4),
        ((1, 2), "sync", 8, 6),
        ((2, 1), "cadence", 7, None),
    ],
)
def test_steps_of_an_epoch(
    groups: Sequence[int] | None, policy: Any, batches: int, steps: int | None
) -> None:
    sizes = Sizes(4, (1, 1), None if groups is None else tuple(groups))
    assert sizes.steps(batches, policy) == steps


@pytest.mark.parametrize(
    ("batch_size", "match"),
    [
        (None, "batch_size is missing"),
        (True, "not True"),
        ("ab", "not 'ab'"),
        ((1, 2.0), "each batch_size must be an int of at least 1, not 2.0"),
        ((1,), "names 1 sizes for 2 devices"),
        ((), "names 0 sizes"),
    ],
)
def test_no_sizes(batch_size: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        plan_sizes(DATA, batch_size, None, 1, "sync", 2)
