"""Tests of samples that cannot be read: the error names the one, here and from a worker process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, get_worker_info

from flowdp import DataError, ReadingOptions, Trainer
from flowdp.data.samples import Samples, described

pytestmark = pytest.mark.usefixtures("stopped_runs")

BROKEN = 37


class Photos(Dataset[Any]):
    """Sixty-four samples, one of which cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        info = get_worker_info()
        assert info is None or isinstance(info.dataset, Photos)  # the user's own
        if index == BROKEN:
            raise OSError("photo_37.jpg is truncated\nafter 12 bytes")
        return torch.ones(2), torch.ones(1)


class Listed(Photos):
    """The same, read list by list."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def failure(dataset: Dataset[Any], **reading: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        Trainer(
            model=nn.Linear(2, 1),
            optimizer=torch.optim.SGD,
            loss=nn.MSELoss(),
            dataset=dataset,
            batch_size=8,
            epochs=1,
            devices=["cpu"],
            reading=ReadingOptions(shuffle=False, **reading),
        ).fit()
    return caught.value


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_error_names_the_sample(num_workers: int) -> None:
    error = failure(Photos(), num_workers=num_workers)
    assert str(error) == (
        "reading sample 37, for batch 5 of epoch 1, failed: OSError: photo_37.jpg is truncated\n"
        "after 12 bytes"
    )
    assert (error.sample, error.epoch, error.indices) == (37, 0, tuple(range(32, 40)))
    assert isinstance(error.__cause__, OSError)
    if not num_workers:
        assert error.__cause__.__traceback__ is not None
        assert error.__cause__.__traceback__.tb_frame.f_code.co_name == "__getitem__"


def test_the_sample_is_that_of_the_subset() -> None:
    error = failure(Subset(Subset(Photos(), range(30, 60)), range(20)))
    assert error.sample == BROKEN - 30


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dataset_that_reads_lists_names_the_batch(wrapped: bool) -> None:
    dataset = Subset(Listed(), range(64)) if wrapped else Listed()
    error = failure(dataset)
    assert error.sample is None
    assert str(error).startswith("reading batch 5 of epoch 1 (samples 32, 33, 34, 35, 36, 37, 38, 39) failed")


def test_it_reads_what_torch_would() -> None:
    assert len(Samples(Photos()).__getitems__([3, 1])) == 2
    assert described(KeyError("x")) == (None, "KeyError: 'x'")
