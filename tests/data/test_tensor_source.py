"""Tests of gathering from tensors; ordinary runs are in test_open_source.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowdp.data.epoch_order import EpochOrder
from flowdp.data.tensor_source import TensorSource
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

X, Y = torch.rand(10, 3), torch.arange(10)


def source(*tensors: Any, seed: int = 1) -> TensorSource:
    order = EpochOrder(10, 4, seed, shuffle=True, drop_last=False)
    return TensorSource(tensors or (X, Y), tuple, order)


def test_parts_are_gathered_into_the_memory_that_is_given():
    made = source()
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    for batch in range(3):
        rows = made.samples_in(0, batch)
        out = [x[:rows], y[:rows]]
        parts = made.gather(0, batch, out=out)
        index = made.index(0, batch)
        assert [part.data_ptr() for part in parts] == [x.data_ptr(), y.data_ptr()]
        assert torch.equal(x[:rows], X[index])
        assert torch.equal(y[:rows], Y[index])
        assert all(map(torch.equal, made.take(0, 0, batch), parts))


@pytest.mark.parametrize("into", [None, [torch.zeros(4, 3)]])
def test_a_wrong_index_names_the_batch(into):
    made = source(X[:5])
    batch = next(b for b in range(2) if made.index(0, b).max() >= 5)
    with pytest.raises(DataError, match=f"batch {batch + 1} of epoch 1 from tensors of 5 samples") as caught:
        made.gather(0, batch, out=into)
    assert caught.value.epoch == 0
    assert caught.value.indices == made.indices(0, batch)


@pytest.mark.parametrize("samples", [10, 5, 4])
def test_a_small_part_of_the_rows_is_known_as_one(samples):
    order = EpochOrder(samples, 2, 0, shuffle=True, drop_last=False)
    made = TensorSource((X, Y), tuple, order, torch.arange(10)[10 - samples :])
    assert made.is_sparse is (samples < 5)
    assert torch.equal(made.take(0, 0, 1)[1], Y[10 - samples :][order.indices(0, 1)])


def test_tensors_of_a_device_are_brought_to_the_host_once():
    class Far:
        device = torch.device("cuda", 1)

        def cpu(self) -> torch.Tensor:
            return X

    made = source(Far(), Y).on_host()
    index = made.index(1, 2)
    assert torch.equal(index, source().index(1, 2))
    assert torch.equal(made.take(0, 1, 2)[0], X[index])
    assert made.tensors[1] is Y


def test_tensors_of_several_devices_come_to_the_host_for_other_streams():
    class Far:
        device = torch.device("cuda", 1)

        def cpu(self) -> torch.Tensor:
            return X

    assert source(Far(), Y).for_all_streams().tensors == (X, Y)
    made = source()
    assert made.for_all_streams() is made


@pytest.mark.parametrize("start", [0, 1, 4])
def test_a_part_gathers_its_samples_alone(start):
    made = source()
    part = SampleRange(start, 4)
    portion = made.take(0, 0, 1, part)
    x, y = portion.rows(0, portion.samples)
    assert torch.equal(x, X[made.index(0, 1)[start:]])
    assert torch.equal(y, Y[made.index(0, 1)[start:]])
    assert portion.samples == 4 - start
