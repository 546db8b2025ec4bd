"""Tests of packed copies: many tensors as one copy per dtype, with unchanged values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowdp.device.copies import carry, copied

THERE = torch.device("cpu", 0)  # another device by name, with readable values
NOWHERE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies between devices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_to_copy" in str(func)
        return func(*args, **(kwargs or {}))


def mixed() -> list[Tensor | None]:
    return [
        torch.arange(6.0).reshape(2, 3),
        None,
        torch.tensor(7.0),
        torch.arange(4),
        torch.empty(0, 5),
        torch.arange(8.0).reshape(4, 2).T,
        torch.arange(2, dtype=torch.float64),
        torch.tensor([True, False]),
    ]


def test_values_shapes_and_dtypes_arrive() -> None:
    given = mixed()
    for before, after in zip(given, carry(given, THERE), strict=True):
        if before is None:
            assert after is None
        else:
            assert after is not None
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
            assert torch.equal(after, before)


def test_one_copy_for_each_dtype() -> None:
    with Copies() as copies:
        arrived = carry(mixed(), NOWHERE)
    assert copies.count == 4
    assert {tensor.device for tensor in arrived if tensor is not None} == {NOWHERE}


def test_copies_are_memory_of_their_own() -> None:
    given = [tensor for tensor in mixed() if tensor is not None]
    made = copied(given)
    for before, after in zip(given, made, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert torch.equal(after, before)
        assert before.numel() == 0 or after.data_ptr() != before.data_ptr()
    assert copied([]) == []
    single = torch.ones(3)
    copied([single])[0].zero_()
    assert single.sum() == 3
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(copied([sparse, single])[0].to_dense(), torch.eye(3))
