"""flodl's vectors for the depth of the prefetch ring, run through the budget and the ring.

A check returns flowdp's values under the names in the vector. All must agree, except the values that
`differences_data.md` lists with a reason; those must really differ.
"""

from __future__ import annotations

import pytest
import torch

from flowdp.data.prefetch import PrefetchFeed, RingGauge
from flowdp.device.streams import HostLane
from flowdp.errors import OptionError
from flowdp.options import RuntimeOptions
from flowdp.policy.budget import Memory, prefetch_depth
from tests.data.opening import opened
from tests.vectors.book import Answers, Book, Vector

BOOK = Book({"prefetch_depth"}, "differences_data.md")
VECTORS, CHECKS, answers = BOOK.vectors, BOOK.checks, BOOK.answers


@answers("PD-001", "PD-003")
def _without_a_gauge(vector: Vector) -> Answers:
    given = vector["input"]
    return {"depth": prefetch_depth(None, given["per_sample_bytes"] * given["batch_size"])}


@answers("PD-005")
def _before_the_gauge(vector: Vector) -> Answers:
    source = opened(torch.zeros(8, 1), 4)
    lane = HostLane(torch.device("cpu"))
    feed = PrefetchFeed(source, 0, lane, gauge=RingGauge(lane))
    return {"initial": feed.depth, "after_each": None}


@answers("PD-007")
def _usage(vector: Vector) -> Answers:
    stored: list[float | None] = []
    for usage in vector["input"]["vram_max_usage"]:
        try:
            stored.append(RuntimeOptions(memory_fraction=usage).memory_fraction)
        except OptionError:
            stored.append(None)
    return {"stored": stored}


@answers("PD-009")
def _an_almost_empty_device(vector: Vector) -> Answers:
    given = vector["input"]
    memory = Memory(
        total=given["total"],
        free=given["total"] - given["used"],
        reserved=0,
        active=0,
        peak=given["reserve"],
        split=0,
    )
    depth = prefetch_depth(memory, given["batch_bytes"], usage=given["usage"], limit=1000)
    return {"depth": depth, "flodl_actual_due_to_used_free_swap": depth}


# ---------------------------------------------------------------- rules of this file
def agree(answer: object, expected: object) -> bool:
    if isinstance(expected, str) and expected.startswith(">= "):
        return isinstance(answer, int) and answer >= int(expected.split()[1])
    return bool(answer == expected)


def test_every_vector_is_run():
    assert CHECKS.keys() == VECTORS.keys()


def test_every_difference_names_a_value_of_a_vector_and_a_reason():
    BOOK.check_rows()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_vector(name):
    BOOK.check(name, agree)
