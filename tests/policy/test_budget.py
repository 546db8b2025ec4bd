"""Tests of the depth of the ring on empty, half full and full devices."""

from __future__ import annotations

import pytest

from flowdp.policy.budget import (
    DEPTH_LIMIT,
    Memory,
    clamp_usage,
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
    [(0.03, 139), (0.50, 64), (0.89, 1), (0.90, 1), (0.97, 1)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("owner", ["others", "active"])
def test_the_fuller_the_device_the_shorter_the_ring(used, depth, owner):
    memory = device(**{owner: round(TOTAL * used)})
    assert prefetch_depth(memory, BATCH) == depth


def test_what_the_allocator_keeps_and_nobody_uses_is_free():
    assert spare_bytes(device(active=GB, cached=9 * GB)) == spare_bytes(device(active=GB))


def test_pieces_between_used_blocks_are_not():
    assert spare_bytes(device(active=GB, cached=9 * GB, split=2 * GB)) == spare_bytes(device(active=3 * GB))


def test_training_needs_its_peak_again():
    assert spare_bytes(device(active=GB, cached=3 * GB, peak=4 * GB)) == spare_bytes(device(active=4 * GB))


def test_a_full_device_has_less_than_nothing_to_spare():
    assert spare_bytes(device(others=TOTAL)) < 0


def test_the_rings_own_batches_are_no_pressure():
    # As if the ring were measured and divided for the first time, whatever it holds.
    fresh = prefetch_depth(device(active=4 * GB), BATCH)
    assert prefetch_depth(device(active=4 * GB + 30 * BATCH), BATCH, ahead_bytes=30 * BATCH) == fresh


def test_ranks_share_a_device():
    memory = device(active=4 * GB)
    alone = prefetch_depth(memory, BATCH)
    assert prefetch_depth(memory, BATCH, ranks=2) == alone // 2
    assert prefetch_depth(memory, BATCH, ranks=1000) == 1


def test_tiny_batches_are_not_fetched_by_the_million():
    assert prefetch_depth(device(), 100) == DEPTH_LIMIT == 512


def test_without_a_gauge_or_without_tensors_two_are_enough():
    assert prefetch_depth(None, BATCH) == 2
    assert prefetch_depth(device(), 0) == 2


@pytest.mark.parametrize(("given", "kept"), [(0.1, 0.5), (0.5, 0.5), (0.8, 0.8), (1.5, 0.99)])
def test_usage_is_clamped(given, kept):
    assert clamp_usage(given) == kept
    assert spare_bytes(device(), given) == int(TOTAL * kept)


@pytest.mark.parametrize(
    ("memory", "limit"),
    [(device(), 7.2), (device(others=8 * GB), 3.2), (device(active=8 * GB, cached=2 * GB), 3.2)],
    ids=["empty", "half full with others", "half full with our own"],
)
def test_a_dataset_may_take_half_of_what_is_left(memory, limit):
    assert fits(memory, int(limit * GB))
    assert not fits(memory, int(limit * GB) + 1)


def test_nothing_fits_on_a_full_device_but_nothing_needs_no_room():
    assert not fits(device(others=round(0.97 * TOTAL)), 1)
    assert fits(device(), 0)


@pytest.mark.parametrize(
    ("batch_bytes", "depth"),
    [(0, 64), (1, 64), (32 << 20, 64), (77_000_000, 27), (1 << 30, 2), (3 << 30, 1)],
)
def test_batches_that_stay_in_host_memory_are_bounded_there(batch_bytes, depth):
    assert payload_depth(batch_bytes) == depth
