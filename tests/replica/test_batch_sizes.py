"""Tests of batch sizes: those of the source, and the batches per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flowdp.errors import OptionError
from flowdp.replica.batch_sizes import Sizes, grows, plan_sizes, policy_of

DATA = TensorDataset(torch.ones(20, 1))


@pytest.mark.parametrize(
    ("per_device", "accumulation", "expected"),
    [
        (8, 1, Sizes(8, (1, 1), (1, 1))),
        ([8, 8], 1, Sizes(8, (1, 1), (1, 1))),
        (8, 3, Sizes(8, (1, 1), (3, 3))),
        ((64, 32), 1, Sizes(32, (2, 1), (2, 1))),
        ((6, 4), 1, Sizes(2, (3, 2), (3, 2))),
        ((6, 4), 2, Sizes(2, (3, 2), (6, 4))),
        ((7, 5), 1, Sizes(1, (7, 5), (7, 5))),
    ],
)
def test_what_the_ranks_take(per_device: Any, accumulation: int, expected: Sizes) -> None:
    assert plan_sizes(DATA, None, per_device, accumulation, "cadence", 2) == expected


@pytest.mark.parametrize(("batch_size", "ranks", "each"), [(64, 1, 64), (64, 2, 32), (64, 3, 22), (2, 4, 1)])
@pytest.mark.parametrize("is_loader", [False, True])
def test_devices_that_average_parameters_divide_the_batch(
    batch_size: int, ranks: int, each: int, is_loader: bool
) -> None:
    data, given = (DataLoader(DATA, batch_size), None) if is_loader else (DATA, batch_size)
    assert plan_sizes(data, given, None, 1, "cadence", ranks) == Sizes(each, (1,) * ranks, (1,) * ranks)


@pytest.mark.parametrize(
    ("batch_size", "per_device", "accumulation", "expected"),
    [
        (64, None, 1, Sizes(64, (1, 1), (1, 1), 64, (64, 64))),
        (64, None, 3, Sizes(192, (1, 1), (1, 1), 192, (64, 64))),
        (None, 8, 1, Sizes(16, (1, 1), (1, 1), 16, (8, 8))),
        (100, 8, 1, Sizes(100, (1, 1), (1, 1), 100, (8, 8))),
        (None, (6, 4), 1, Sizes(10, (1, 1), (1, 1), 10, (6, 4))),
        (None, (6, 4), 2, Sizes(20, (1, 1), (1, 1), 20, (6, 4))),
    ],
)
def test_what_a_window_is(
    batch_size: int | None, per_device: Any, accumulation: int, expected: Sizes
) -> None:
    assert plan_sizes(DATA, batch_size, per_device, accumulation, "exact", 2) == expected


@pytest.mark.parametrize(
    ("groups", "policy", "batches", "steps"),
    [
        ((1, 1), "cadence", 7, 7),
        ((3, 3), "cadence", 7, 3),
        ((2, 1), "sync", 7, 5),
        ((2, 1), "sync", 6, 4),
        ((1, 2), "sync", 8, 6),
        ((2, 1), "cadence", 7, None),
    ],
)
def test_steps_of_an_epoch(groups: Sequence[int], policy: Any, batches: int, steps: int | None) -> None:
    sizes = Sizes(4, (1, 1), tuple(groups))
    assert sizes.steps(batches, policy) == steps


@pytest.mark.parametrize(
    ("batch_size", "per_device", "match"),
    [
        (None, None, "batch_size is missing"),
        (True, None, "not True"),
        ("ab", None, "not 'ab'"),
        ([4, 8], None, r"is one number, .* is per_device_batch_size=\[4, 8\]"),
        (None, "ab", "per_device_batch_size must be an int"),
        (None, (1, 2.0), "each per_device_batch_size must be an int of at least 1, not 2.0"),
        (None, (1,), "names 1 sizes for 2 devices"),
        (None, (), "names 0 sizes"),
        (8, 4, "says the same in another way"),
    ],
)
def test_no_sizes(batch_size: Any, per_device: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        plan_sizes(DATA, batch_size, per_device, 1, "sync", 2)


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_a_loader_has_a_size_of_its_own(policy: Any) -> None:
    with pytest.raises(OptionError, match="batch_size=8 was given beside a DataLoader"):
        plan_sizes(DataLoader(DATA, 5), 8, None, 1, policy, 2)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(DATA.tensors[0])


@pytest.mark.parametrize(
    ("dataset", "train_step"),
    [
        (Endless(), None),
        (DataLoader(Endless(), 4), None),
        (DataLoader(DATA, batch_size=None), None),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), None),
        (DATA, print),
    ],
)
def test_one_device_trains_what_exact_cannot_split(dataset: Any, train_step: Any) -> None:
    assert policy_of("exact", 1, dataset, train_step) == "sync"
    assert policy_of("exact", 2, dataset, train_step) == "exact"
    assert policy_of("cadence", 1, dataset, train_step) == "cadence"
    assert policy_of("exact", 1, DATA, None) == "exact"


@pytest.mark.parametrize(
    ("dataset", "batch_size", "per_device", "policy", "expected"),
    [
        (DATA, 64, None, "exact", False),
        (DATA, 64, 8, "exact", False),
        (DATA, None, 8, "exact", True),
        (DATA, None, 8, "sync", True),
        (DATA, 64, None, "sync", False),
        (DataLoader(DATA, 5), None, 2, "exact", False),  # the loader's batches are shared
        (DataLoader(DATA, 5), None, 2, "sync", True),
        (DataLoader(DATA, 5), None, None, "sync", False),
        (DataLoader(DATA, batch_size=None), None, None, "sync", True),
    ],
)
def test_a_rate_is_scaled_where_the_batch_grows(
    dataset: Any, batch_size: int | None, per_device: int | None, policy: Any, expected: bool
) -> None:
    assert grows(dataset, batch_size, per_device, policy) is expected
