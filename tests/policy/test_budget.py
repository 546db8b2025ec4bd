"""Tests of the depth of the ring on empty, half full and full devices."""

from __future__ import annotations

from typing import Any

import pytest

from flowdp.policy.budget import (
    DEPTH_LIMIT,
    LOOK_MS,
    Memory,
    RingBudget,
    fits,
    payload_depth,
    prefetch_depth,
    spare_bytes,
)

GB = 10**9
TOTAL = 16 * GB
BATCH = 100 * 10**6


def device(others: int = 0, active: int = 0, *, cached: int = 0, peak: int = 0, split: int = 0) -> Memory:
    """A device with memory used by other processes, by ours, and cached unused by the allocator."""
    reserved = active + cached
    return Memory(TOTAL, TOTAL - others - reserved, reserved, active, max(peak, active), split)


@pytest.mark.parametrize(
    ("used", "depth"),
    [(0.03, 139), (0.50, 64), (0.89, 1), (0.90, 0), (0.97, 0)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("owner", ["others", "active"])
def test_the_fuller_the_device_the_shorter_the_ring(used, depth, owner):
    memory = device(**{owner: round(TOTAL * used)})
    assert prefetch_depth(memory, BATCH, limit=1000) == depth
    assert prefetch_depth(memory, BATCH) == min(depth, DEPTH_LIMIT)


def test_what_the_allocator_keeps_and_nobody_uses_is_free():
    assert spare_bytes(device(active=GB, cached=9 * GB)) == spare_bytes(device(active=GB))


def test_training_needs_its_peak_again():
    assert spare_bytes(device(active=GB, cached=3 * GB, peak=4 * GB)) == spare_bytes(device(active=4 * GB))


def test_a_full_device_has_less_than_nothing_to_spare():
    assert spare_bytes(device(others=TOTAL)) < 0


def test_ranks_share_a_device():
    memory = device(active=4 * GB)
    alone = prefetch_depth(memory, BATCH, limit=1000)
    assert prefetch_depth(memory, BATCH, ranks=2, limit=1000) == alone // 2
    assert prefetch_depth(memory, BATCH, ranks=1000) == 0


def test_without_a_gauge_or_without_tensors_two_are_enough():
    assert prefetch_depth(None, BATCH) == 2
    assert prefetch_depth(device(), 0) == 2
    assert prefetch_depth(None, BATCH, limit=1) == 1


@pytest.mark.parametrize(
    ("memory", "limit"),
    [(device(), 7.2), (device(others=8 * GB), 3.2), (device(active=8 * GB, cached=2 * GB), 3.2)],
    ids=["empty", "half full with others", "half full with our own"],
)
def test_a_dataset_may_take_half_of_what_is_left(memory, limit):
    assert fits(memory, int(limit * GB))
    assert not fits(memory, int(limit * GB) + 1)


@pytest.mark.parametrize(
    ("batch_bytes", "depth"),
    [(0, 64), (1, 64), (32 << 20, 64), (77_000_000, 27), (1 << 30, 2), (3 << 30, 1)],
)
def test_batches_that_stay_in_host_memory_are_bounded_there(batch_bytes, depth):
    assert payload_depth(batch_bytes) == depth


# ---------------------------------------------------------------- from reading to reading
def open_budget(ranks: int = 1, **options: Any) -> RingBudget:
    budget = RingBudget(ranks, **options)
    for rank in range(ranks):
        budget.trained(rank)
    return budget


def depth(budget: RingBudget, memory: Memory, ahead: int, epoch: int = 0, now_ms: float = 0.0) -> int:
    [found] = budget.depths(memory, [BATCH], ahead * BATCH, epoch, now_ms)
    return found


def test_nothing_is_read_before_every_rank_has_taken_a_step():
    budget = RingBudget(2)
    assert budget.first == 1
    assert not budget.is_due(0, 0.0)
    budget.trained(1)
    assert not budget.is_due(0, 0.0)
    budget.trained(0)
    assert budget.is_due(0, 0.0)


def test_it_is_read_in_each_epoch_and_in_each_second():
    budget = open_budget()
    depth(budget, device(), 0, epoch=2, now_ms=100.0)
    assert not budget.is_due(2, 100.0 + LOOK_MS - 1)
    assert budget.is_due(2, 100.0 + LOOK_MS)
    assert budget.is_due(3, 101.0)
    assert not budget.is_due(1, 101.0), "a rank that is an epoch behind is no new epoch"


def test_the_largest_need_counts_whatever_the_ring_held_then():
    budget = open_budget()
    room = round(0.9 * TOTAL)
    need = room - 10 * BATCH
    # A ring of 16 stood beside a small peak, one of two beside the large one.
    assert depth(budget, device(peak=4 * GB + 16 * BATCH), 16) == DEPTH_LIMIT
    assert depth(budget, device(peak=need + 2 * BATCH), 2) == 10
    assert depth(budget, device(peak=4 * GB + 10 * BATCH), 10) == 10
    # The peak is never reset, and the ring of that time is no need of later ones.
    assert depth(budget, device(peak=need + 2 * BATCH), 0) == 10


def test_another_program_shortens_the_ring_down_to_nothing_and_it_grows_again():
    budget = open_budget()
    need = 8 * GB
    found = [
        depth(budget, device(others=others, active=need + ahead * BATCH), ahead)
        for others, ahead in [(0, 1), (6 * GB, 16), (round(6.4 * GB), 4), (7 * GB, 0), (0, 0)]
    ]
    assert found == [16, 4, 0, 0, 16]


def test_a_step_that_ran_out_of_memory_closes_it_until_one_is_done():
    budget = open_budget(2)
    budget.depths(device(peak=14 * GB), [BATCH] * 2, 0, 0, 0.0)
    budget.step_ran_short([8, 3])
    assert budget.limits == [4, 1]
    budget.trained(0)
    assert not budget.is_due(5, 10**6)
    budget.trained(1)
    assert budget.is_due(0, 0.0)
    assert budget.depths(device(peak=14 * GB), [BATCH] * 2, 0, 0, 0.0) == [2, 1]


def test_what_ran_short_may_double_with_each_epoch():
    budget = open_budget()
    depth(budget, device(), 0)
    assert budget.ran_short(0, 5) == 2
    assert [depth(budget, device(), 0, epoch) for epoch in (0, 1, 1, 2, 3, 4)] == [2, 4, 4, 8, 16, 16]
    assert budget.ran_short(0, 1) == 0
    assert [depth(budget, device(), 0, epoch) for epoch in (4, 5, 6)] == [0, 1, 2]


def test_a_limit_of_the_users_holds():
    assert RingBudget(1, limit=0).first == 0
    budget = open_budget(limit=3)
    assert [depth(budget, device(), 0, epoch) for epoch in range(3)] == [3, 3, 3]
    none = open_budget(limit=0)
    assert [depth(none, device(), 0, epoch) for epoch in range(3)] == [0, 0, 0]
