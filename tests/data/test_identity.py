"""Tests of the comparison of what machines have opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from flowdp.data.epoch_order import Stride
from flowdp.data.identity import Identity, check_identities, content_checksum
from flowdp.errors import OptionError
from tests.data.opening import opened

NAMES = ("machine 0 (one)", "machine 1 (two)", "machine 2 (three)")


def identity(dataset: Any, **options: Any) -> Identity:
    size = None if isinstance(dataset, DataLoader) else 5
    return opened(dataset, **{"batch_size": size, "epochs": 3, "stride": Stride(0, 3), **options}).identity()


class Stream(IterableDataset[Any]):
    """Numbers from `first` on, each with its square root; `closed` counts the iterators that were closed."""

    def __init__(self, first: float = 0.0) -> None:
        self.first = first
        self.closed = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, float]]:
        try:
            for number in torch.arange(self.first, 20.0):
                yield number, float(number) ** 0.5
        finally:
            self.closed += 1


def seeded(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(range(23), 5, sampler=RandomSampler(range(23), num_samples=12, generator=generator))


def batched(first: int) -> DataLoader[Any]:
    return DataLoader(range(23), batch_sampler=[list(range(first)), list(range(first, 23))])


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: torch.ones(23, 2),
        lambda: TensorDataset(torch.ones(23, 2), torch.ones(23)),
        lambda: range(23),
        lambda: DataLoader(range(23), 5, shuffle=True),
        lambda: seeded(3),
        lambda: batched(11),
    ],
)
def test_machines_that_opened_the_same(dataset):
    found = [identity(dataset()) for _ in range(3)]
    check_identities(found, NAMES)
    assert found[0].order is not None


def test_a_stream_is_known_by_its_first_item():
    stream = Stream()
    found = identity(stream, on_demand=True)
    check_identities([found, identity(Stream(), on_demand=True)], NAMES[:2])
    assert (found.first, found.order) == (content_checksum((torch.tensor(0.0), 0.0)), None)
    assert stream.closed == 1
    assert stream.epochs == [0]


def test_parts_of_a_stream_begin_with_different_items():
    parts = [identity(Stream(first), is_part=True) for first in (0.0, 1.0, 2.0)]
    check_identities(parts, NAMES)
    with pytest.raises(
        OptionError, match=r"same first item on machine 0 .* and machine 2 .*, or leave stream out"
    ):
        check_identities([*parts[:2], parts[0]], NAMES)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (lambda: range(23), lambda: range(22), "samples: 23 on machine 0 .one., 22 on machine 2"),
        (
            lambda: torch.ones(9, 2),
            lambda: torch.ones(9, 3),
            r"tensors: \(9, 2\) torch.float32 on .*\(9, 3\)",
        ),
        (lambda: seeded(3), lambda: seeded(4), "order: .* and seed"),
        (lambda: batched(11), lambda: batched(12), "order: "),
        (lambda: Stream(), lambda: Stream(1.0), "first: .* split itself by rank"),
    ],
)
def test_machines_that_opened_something_else(one, other, message):
    options = {"on_demand": True} if isinstance(one(), Stream) else {}
    found = [identity(make(), **options) for make in (one, one, other)]
    with pytest.raises(OptionError, match=f"have opened the evaluation differently: {message}"):
        check_identities(found, NAMES, "evaluation")


@pytest.mark.parametrize("option", [{"seed": 1}, {"shuffle": False}, {"batch_size": 6}, {"drop_last": True}])
def test_other_options(option):
    with pytest.raises(OptionError, match="machine 1"):
        check_identities([identity(range(23)), identity(range(23), **option)], NAMES[:2])
