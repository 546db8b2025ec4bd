"""Limits of an epoch: which batches are left, of every kind of dataset."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flowdp.data.limit import UNLIMITED, Limit, check_limit
from flowdp.data.source import Source
from flowdp.errors import OptionError
from tests.data import opening
from tests.limits import HANG_S

SAMPLES = 23
NUMBERS = torch.arange(SAMPLES)


def opened(dataset: Any, limit: Limit | None, **options: Any) -> Source:
    size = None if isinstance(dataset, DataLoader) else 4
    return opening.opened(dataset, **{"batch_size": size, "seed": 3, "limit": limit or UNLIMITED, **options})


def samples(source: Source, epoch: int) -> list[int]:
    assert source.batches is not None
    return [index for batch in range(source.batches) for index in source.indices(epoch, batch)]


@pytest.mark.parametrize(
    ("limit", "left"), [(None, 6), (2, 2), (9, 6), (6, 6), (1.0, 6), (0.5, 3), (0.49, 2), (0.01, 1)]
)
def test_batches_that_are_left(limit: Any, left: int) -> None:
    found = check_limit("limit_batches", limit) or Limit()
    assert found.of(6) == left
    whole, source = opened(NUMBERS, None), opened(NUMBERS, found)
    assert source.batches == left
    assert source.samples == min(SAMPLES, 4 * left)
    for epoch in (0, 1):  # the beginning of the epoch that there would be, another one in each
        assert samples(source, epoch) == samples(whole, epoch)[: source.samples]
    assert samples(source, 0) != samples(source, 1)
    with pytest.raises(IndexError):
        source.samples_in(0, left)


def test_windows_and_samplers_are_limited() -> None:
    window = opened(DataLoader(TensorDataset(NUMBERS), 2, shuffle=True), Limit(2), batch_size=10)
    assert (window.batches, window.samples, window.samples_in(0, 1)) == (2, 20, 10)
    weighted = WeightedRandomSampler(torch.ones(SAMPLES), 9, generator=torch.Generator().manual_seed(1))
    source = opened(DataLoader(TensorDataset(NUMBERS), 2, sampler=weighted), Limit(0.5))
    assert (source.batches, source.samples) == (2, 4)
    assert len(samples(source, 0)) == 4
    batches = BatchSampler(RandomSampler(range(SAMPLES)), 5, drop_last=False)
    source = opened(DataLoader(TensorDataset(NUMBERS), batch_sampler=[list(b) for b in batches]), Limit(3))
    assert (source.batches, source.samples, source.batch_size) == (3, None, None)
    assert [source.samples_in(0, batch) for batch in range(3)] == [5, 5, 5]


@pytest.mark.parametrize("dataset", [NUMBERS, DataLoader(TensorDataset(NUMBERS), 4, shuffle=True)])
def test_fixed_batches_are_the_first_in_every_epoch(dataset: Any) -> None:
    source = opened(dataset, Limit(2, is_fixed=True))
    assert samples(source, 0) == samples(source, 5) == list(range(8))
    by_samples = opened(NUMBERS, Limit(samples=7, is_fixed=True), batch_size=3)
    assert samples(by_samples, 1) == list(range(7))
    assert [by_samples.samples_in(0, batch) for batch in range(3)] == [3, 3, 1]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_sampler_cannot_be_fixed(kind: str) -> None:
    sampler: Any = SubsetRandomSampler(range(9))
    if kind == "batch_sampler":
        sampler = [[1, 2], [3]]
    loader = DataLoader(TensorDataset(NUMBERS), **{kind: sampler})
    with pytest.raises(OptionError, match="in the dataset's own order, and the DataLoader has a"):
        opened(loader, Limit(2, is_fixed=True))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(NUMBERS)


@pytest.mark.parametrize(("limit", "left", "workers"), [(2, 2, 0), (6, 6, 0), (7, 6, 0), (2, 2, 1)])
def test_a_stream_ends_at_its_limit_in_every_epoch(limit: int, left: int, workers: int) -> None:
    source = opened(Stream(), Limit(limit), epochs=3, num_workers=workers)
    ends: dict[int, int] = {}
    over, woken = Event(), Event()

    def ended(epoch: int, batches: int) -> None:
        ends[epoch] = batches
        woken.set()
        if len(ends) == 3:
            over.set()

    source.on_end(ended)
    source.start(wake=lambda *_: woken.set(), failed=lambda error: over.set())
    try:
        for epoch in range(3):
            for batch in range(left):
                while True:
                    woken.clear()
                    taken = source.take(0, epoch, batch)
                    if taken is not None:
                        break
                    assert woken.wait(HANG_S)
                assert taken.tolist() == list(range(4 * batch, min(SAMPLES, 4 * batch + 4)))
        assert over.wait(HANG_S)
        assert ends == {0: left, 1: left, 2: left}
    finally:
        assert source.close()
