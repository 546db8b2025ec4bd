"""Tests of the source of an evaluation."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flowdp.data.open_evaluation import open_evaluation
from flowdp.data.source import Source
from flowdp.data.tensor_source import TensorSource
from flowdp.errors import OptionError

X = torch.arange(7.0)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return float(index)


class Whole(Numbers):
    def get_batch(self, indices: list[int]) -> torch.Tensor:
        return X[indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(X.tolist())


def negative(samples: list[float]) -> torch.Tensor:
    return -torch.tensor(samples)


def opened(dataset: object, **options: Any) -> Source:
    given = {"batch_size": 3, "collate_fn": None, "num_workers": None, "world_size": 1, **options}
    return open_evaluation(dataset, **given)


def read(source: Source, epochs: int) -> list[list[float]]:
    woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source.start(wake=lambda *key: woken.put(key), failed=woken.put)
    batches = []
    for key in [(epoch, batch) for epoch in range(epochs) for batch in range(3)]:
        while (taken := source.take(0, *key)) is None:
            assert woken.get(timeout=60) == (0, *key)
        batches.append((taken[0] if isinstance(taken, tuple) else taken).tolist())
    assert source.close()
    return batches


@pytest.mark.parametrize(
    "dataset",
    [X, (X,), Numbers(), Whole(), Stream(), DataLoader(Numbers(), 3)],
    ids=["tensor", "tuple", "map", "get_batch", "stream", "loader"],
)
@pytest.mark.parametrize("collate_fn", [None, negative])
def test_all_of_it_in_its_own_order_whatever_the_training_collates(dataset: object, collate_fn: Any) -> None:
    source = opened(dataset, collate_fn=collate_fn, num_workers=0)
    collates = collate_fn and (type(dataset) is Numbers or isinstance(dataset, Stream))
    expected = torch.tensor_split(-X if collates else X, [3, 6])
    assert read(source, 2) == [part.tolist() for part in expected] * 2


def test_the_options_of_the_training_serve_where_they_can() -> None:
    assert isinstance(opened((X,), num_workers=2), TensorSource)
    source: Any = opened(Numbers(), num_workers=2)
    assert source._loader.num_workers == 2
    source = opened(TensorDataset(X), collate_fn=negative)
    assert source._loader.collate_fn is negative


def test_a_loader_keeps_its_settings() -> None:
    source: Any = opened(DataLoader(Numbers(), 5, drop_last=True, collate_fn=negative), num_workers=2)
    assert (source.batches, source.samples, source._loader.num_workers) == (1, 5, 0)
    assert source._loader.collate_fn is negative


@pytest.mark.parametrize("dataset", [3, (), (X, X[:2]), DataLoader(Numbers(), 9, drop_last=True)])
def test_what_cannot_be_read_is_named(dataset: object) -> None:
    with pytest.raises(OptionError, match=r"^evaluation: "):
        opened(dataset)
