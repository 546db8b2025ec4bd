"""The runs of the suite: every two values of two dimensions meet at least once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import torch

import flowdp
from tests.late.orders import EAGER, LATE, Order, first, shuffled
from tests.late.runs import Case

__all__ = ["EXTRA", "all_of", "pairwise"]

POLICIES = ("sync", "cadence", "async", "exact")
PATHS = (("local", (0, 0)), ("local", (0, 1)), ("nccl", (0, 1)), ("cpu", (0, 1)))
DATA = ("resident", "there", "gathered", "full", "streamed", "made", "pinned", "ragged")
FIRST = [first(role) for role in ("compute", "comm", "copy")]

Row = tuple[Any, ...]


def all_of(seeds: Sequence[int]) -> Iterator[Row]:
    """Policy, path, data and order of every run, with these seeds among the orders."""
    orders = [LATE, EAGER, *FIRST, *map(shuffled, seeds)]
    for policy, path, data, order in product(POLICIES, PATHS, DATA, orders):
        if (policy, path[0]) != ("async", "nccl"):
            yield policy, path, data, order


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """Some of the rows, in which any two values that stand together in one of all do so, too."""
    left = {pair for row in rows for pair in pairs_of(row)}
    chosen = []
    while left:
        row = max(rows, key=lambda row: len(left.intersection(pairs_of(row))))
        left.difference_update(pairs_of(row))
        chosen.append(row)
    return chosen


def pairs_of(row: Row) -> list[tuple[Any, Any]]:
    """Places and values of each two entries."""
    return list(combinations(enumerate(row), 2))


def case_of(row: Row) -> tuple[Case, Order]:
    """The run of a row."""
    policy, (backend, devices), data, order = row
    return Case(policy, backend, devices, data), order


EXTRA = [
    *(Case(policy, "local", (0, 1), evaluated="streamed") for policy in POLICIES),
    Case("sync", "local", (0, 0), evaluated="made"),
    Case("sync", "local", (0, 1), evaluated="there"),
    Case("cadence", "local", (0, 0), evaluated="there"),
    Case("cadence", "nccl", (0, 1), "made", evaluated="made"),
    Case("exact", "local", (0,), "streamed"),
    Case("sync", "local", (0,), "there"),
    Case("sync", "nccl", (0, 1, 2), "streamed"),
    Case("cadence", "local", (0, 0, 1, 1), "streamed", options={"epochs": 4}),
    Case("sync", "local", (0, 0), "streamed", options={"gradient_accumulation_steps": 2}),
    Case("exact", "nccl", (0, 1), "streamed", options={"gradient_accumulation_steps": 2}),
    Case("exact", "nccl", (0, 1, 2), options={"max_grad_norm": 0.1}),
    Case("exact", "local", (0, 1, 1), options={"max_grad_norm": 0.1}),
    Case("exact", "nccl", (0, 1), "streamed", are_unlike=True),
    Case("exact", "local", (0, 1), are_unlike=True),
    Case("exact", "cpu", (0, 1), are_unlike=True),
    Case("cadence", "local", (0, 1), dtype=torch.float32, options={"precision": "bf16"}),
    Case("cadence", "nccl", (0, 1), "made", options={"outer": flowdp.OuterOptions()}),
    Case("async", "local", (0, 1), "made", options={"outer": flowdp.OuterOptions()}),
    Case("sync", "local", (0, 1), options={"epochs": 5}),
    Case("sync", "nccl", (0, 1), "streamed", leaver=1),
    Case("cadence", "local", (0, 0), leaver=1),
    Case("sync", "local", (0, 0), "streamed", fills=True),
]
"""Runs with one thing more."""
