"""Tests of the source of an evaluation."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flowdp.data.source import Source
from flowdp.engine.shared_batches import SharedBatches
from tests.data.opening import evaluated

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
    return evaluated(dataset, **{"batch_size": 3, **options})


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


class Reads(Dataset[Any]):
    """Counts the reads of each of 1,003 indices, in any process."""

    def __init__(self) -> None:
        self.counts = torch.zeros(1003, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 1003

    def __getitem__(self, index: int) -> int:
        self.counts[index] += 1
        return index


class ReadStream(Reads, IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(1003))


def read_by(machine: int, machines: int, dataset: object, **options: Any) -> list[list[int]]:
    """What a machine reads in two evaluations."""
    source = opened(dataset, batch_size=8, machine=machine, machines=machines, **options)
    batches = SharedBatches(source)
    woken: queue.SimpleQueue[bool] = queue.SimpleQueue()
    batches.start(wake=lambda *_: woken.put(True), failed=lambda _: woken.put(False))
    found: list[list[int]] = []
    for _ in range(2):
        number = batches.begin(0)
        found.append([])
        while (taken := batches.take(0, number, lambda: woken.get(timeout=60))) is not None:
            batch, payload = taken
            assert batch % machines == machine
            assert source.samples_in(number, batch) == (3 if batch == 125 else 8)
            found[-1] += (payload["x"] if isinstance(payload, dict) else payload).tolist()
        assert batches.end(number) == 126
    assert source.close()
    return found


@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.parametrize("kind", ["tensors", "map", "processes", "stream", "processes of a stream"])
def test_all_machines_together_read_each_sample_once(machines: int, kind: str) -> None:
    kinds = {"tensors": lambda: {"x": torch.arange(1003)}, "map": Reads, "stream": ReadStream}
    dataset = kinds[{"processes": "map", "processes of a stream": "stream"}.get(kind, kind)]()
    options = {"num_workers": 1 if kind.startswith("processes") else 0}
    found = [read_by(machine, machines, dataset, **options) for machine in range(machines)]
    for evaluation in range(2):
        assert sorted(i for of_machine in found for i in of_machine[evaluation]) == list(range(1003))
    if type(dataset) is Reads:  # nothing is read for another machine, but for what lies ready at the end
        for machine, of_machine in enumerate(found):
            assert of_machine[0] == [i for i in range(1003) if i // 8 % machines == machine]
        assert dataset.counts.max() <= 2 + options["num_workers"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_machine_without_a_batch(num_workers: int) -> None:
    source = opened(Numbers(), batch_size=4, num_workers=num_workers, machine=2, machines=3)
    batches = SharedBatches(source)
    batches.start(wake=lambda *_: None, failed=lambda _: None)
    number = batches.begin(0)
    assert batches.take(0, number, lambda: False) is None
    assert batches.end(number) == 2
    assert source.close()
