"""Tests of packed copies: many tensors as one copy per dtype, with unchanged values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowdp.device import copies
from flowdp.device.copies import carry, check_copies
from flowdp.device.streams import QUIET
from flowdp.errors import OptionError

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
    made = carry(given, CPU, anew=True)
    for before, after in zip(given, made, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert torch.equal(after, before)
        assert before.numel() == 0 or after.data_ptr() != before.data_ptr()
    assert carry([], CPU, anew=True) == []
    single = torch.ones(3)
    carry([single], CPU, anew=True)[0].zero_()
    assert single.sum() == 3
    sparse = torch.eye(3).to_sparse()
    [made] = carry([sparse], CPU, anew=True)
    assert made is not sparse
    assert torch.equal(made.to_dense(), torch.eye(3))


CARDS = [torch.device("cuda", index) for index in range(3)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    known = set(copies._fine)
    copies._fine.clear()
    yield
    copies._fine.clear()
    copies._fine.update(known)


class Link:
    """Links between cards.

    Args:
        broken: Pairs of indices that lose what is copied.
    """

    def __init__(self, *broken: tuple[int, int]) -> None:
        self.broken = broken
        self.used: list[tuple[int, int]] = []

    def __call__(self, numbers: Tensor, one: torch.device, other: torch.device) -> Tensor:
        assert QUIET.locked(), "another run may be launching a collective"
        self.used.append((one.index, other.index))
        arrived = numbers.clone()
        if self.used[-1] in self.broken:
            arrived[100:] = 0
        return arrived


def test_each_pair_is_checked_once_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    monkeypatch.setattr(copies, "copy_across", link)
    check_copies([*CARDS[:2], CPU, CARDS[0]])
    assert link.used == [(0, 1), (1, 0)]
    check_copies(CARDS)
    assert sorted(link.used) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    check_copies(CARDS)
    assert len(link.used) == 6


def test_a_broken_direction_is_named_and_not_taken_for_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "copy_across", Link((2, 0)))
    for _ in range(2):
        with pytest.raises(OptionError, match=r"copied from cuda:2 to cuda:0, 262,\d+ arrive wrong"):
            check_copies(CARDS)


def test_memory_of_an_earlier_copy_is_not_taken_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that never arrives leaves there what lay there, such as the numbers of the pair before."""
    before: list[Tensor] = []

    def stale(numbers: Tensor, one: torch.device, other: torch.device) -> Tensor:
        before.append(numbers.clone())
        return before[0]

    monkeypatch.setattr(copies, "copy_across", stale)
    with pytest.raises(OptionError, match="cuda:1 to cuda:0"):
        check_copies(CARDS[:2])


@pytest.mark.gpu(2)
def test_cards_copy_to_each_other() -> None:
    check_copies(CARDS[:2])
