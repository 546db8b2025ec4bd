"""Tests of the check of copies between cards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flowdp.device import peer_copies
from flowdp.device.peer_copies import check_copies
from flowdp.device.streams import QUIET
from flowdp.errors import OptionError

CARDS = [torch.device("cuda", index) for index in range(3)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    known = set(peer_copies._fine)
    peer_copies._fine.clear()
    yield
    peer_copies._fine.clear()
    peer_copies._fine.update(known)


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


def test_each_pair_is_checked_once_in_both_directions() -> None:
    link = Link()
    check_copies([*CARDS[:2], CPU, CARDS[0]], link)
    assert link.used == [(0, 1), (1, 0)]
    check_copies(CARDS, link)
    assert sorted(link.used) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    check_copies(CARDS, link)
    assert len(link.used) == 6


def test_a_broken_direction_is_named_and_not_taken_for_fine() -> None:
    link = Link((2, 0))
    for _ in range(2):
        with pytest.raises(OptionError, match=r"copied from cuda:2 to cuda:0, 262,\d+ arrive wrong"):
            check_copies(CARDS, link)


def test_memory_of_an_earlier_copy_is_not_taken_for_this_one() -> None:
    """A copy that never arrives leaves there what lay there, such as the numbers of the pair before."""
    before: list[Tensor] = []

    def stale(numbers: Tensor, one: torch.device, other: torch.device) -> Tensor:
        before.append(numbers.clone())
        return before[0]

    with pytest.raises(OptionError, match="cuda:1 to cuda:0"):
        check_copies(CARDS[:2], stale)


@pytest.mark.gpu(2)
def test_cards_copy_to_each_other() -> None:
    check_copies(CARDS[:2])
