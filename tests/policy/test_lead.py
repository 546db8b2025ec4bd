import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.drift import GuardAction
from flowdp.policy.lead import Overshoot, lead_limits

ranks = st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8)


def test_a_rank_without_batches_holds_no_other_back():
    assert lead_limits([9, 0, 5], [True, True, True], 3) == [4, 9, 4]
    assert lead_limits([9, 0, 5], [True, False, True], 3) == [9, 9, 13]
    assert lead_limits([9, 0, 5], [True, False, False], 3) == [None, 13, 13]
    assert lead_limits([9, 0], [False, False], 0) == [None, None]


@given(ranks, st.integers(0, 10))
def test_one_rank_can_always_move(given_ranks, limit):
    steps, movable = zip(*given_ranks, strict=True)
    most = lead_limits(steps, movable, limit)
    free = [
        can and (top is None or taken < top) for can, taken, top in zip(movable, steps, most, strict=True)
    ]
    assert any(free) == any(movable)


@given(st.integers(2, 6), st.integers(0, 5), st.data())
def test_a_lead_stays_within_one_of_the_limit(world_size, limit, data):
    steps = [0] * world_size
    for rank in data.draw(st.lists(st.integers(0, world_size - 1), max_size=60)):
        most = lead_limits(steps, [True] * world_size, limit)[rank]
        assert most is not None
        if steps[rank] < most:
            steps[rank] += 1
        assert max(steps) - min(steps) <= limit + 1


@pytest.mark.parametrize(("batches", "start", "most"), [(10, 2, 3), (250, 2, 5), (400, 4, 8), (10**6, 5, 10)])
def test_overshoot_grows_to_its_cap_and_falls_back_to_its_start(batches, start, most):
    overshoot = Overshoot(batches)
    assert overshoot.value == start
    for _ in range(20):
        overshoot.averaged(GuardAction.STABLE)
    assert overshoot.value == most
    overshoot.averaged(GuardAction.HOLD)
    assert overshoot.value == most
    overshoot.averaged(GuardAction.TIGHTEN)
    assert overshoot.value == start


@pytest.mark.parametrize("limit", [0, 1, 40])
def test_a_limit_of_the_users_is_kept(limit):
    overshoot = Overshoot(1000, limit)
    for action in GuardAction:
        overshoot.averaged(action)
        assert overshoot.value == limit
