"""Owners of a model's parameters."""

from __future__ import annotations

import random

import pytest

from flowdp.policy.owners import divide


@pytest.mark.parametrize(
    ("sizes", "ranks", "owners"),
    [
        ([4, 4, 4, 4], 2, (0, 0, 1, 1)),
        ([4, 4, 4], 3, (0, 1, 2)),
        ([1, 1, 100, 1, 1], 2, (0, 0, 1, 1, 1)),
        ([100], 4, (2,)),
        ([], 2, ()),
        ([0, 0], 2, (0, 0)),
    ],
)
def test_examples(sizes: list[int], ranks: int, owners: tuple[int, ...]) -> None:
    assert divide(sizes, ranks) == owners


def test_no_rank_owns_more_than_its_part_and_one_parameter() -> None:
    draw = random.Random(0)
    for _ in range(2_000):
        ranks = draw.randint(1, 8)
        sizes = [draw.choice((1, 7, 64, 1000, 50_000)) for _ in range(draw.randint(1, 60))]
        owners = divide(sizes, ranks)
        assert list(owners) == sorted(owners)
        assert set(owners) <= set(range(ranks))
        for rank in set(owners):
            owned = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
            assert owned <= sum(sizes) / ranks + max(sizes)
