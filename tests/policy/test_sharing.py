"""Tests of steps that all ranks share, some of them, or one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from flowdp.policy.recovery import LONGEST_GAP
from flowdp.policy.sharing import CONFIRMATIONS, FIRST_TRIAL, LAST_TRIAL, Exclusion, Sharing


def trials(sharing: Sharing, shared_ms: float, alone_ms: float, orders: int) -> list[int]:
    """The orders that were trials, when each is held before the next is planned."""
    found = []
    for order in range(orders):
        is_trial = sharing.plan()
        shared = sharing.is_shared != is_trial
        found += [order] if is_trial else []
        sharing.measured(shared, shared_ms if shared else alone_ms)
    return found


def test_a_step_is_tried_once_its_time_is_known() -> None:
    sharing = Sharing()
    assert not sharing.plan()
    sharing.measured(True, 1.0)
    assert sharing.plan()
    assert not sharing.plan()  # one at a time
    sharing.measured(True, 1.0)  # armed before
    sharing.measured(False, 0.5)
    assert not sharing.is_shared


def test_the_faster_way_stays() -> None:
    for shared_ms, alone_ms in ((1.0, 0.5), (1.0, 2.0), (1.0, 0.97), (500.0, 400.0)):
        sharing = Sharing()
        trials(sharing, shared_ms, alone_ms, 2000)
        assert sharing.is_shared == (alone_ms > 0.95 * shared_ms)


def test_trials_that_change_nothing_become_rare() -> None:
    tried = trials(Sharing(), 1.0, 2.0, 3000)
    between = [later - earlier - 1 for earlier, later in pairwise(tried)]
    assert between[0] == 2 * FIRST_TRIAL
    assert between[-1] == LAST_TRIAL
    assert between == sorted(between)


def test_a_change_is_noticed() -> None:
    sharing = Sharing()
    trials(sharing, 1.0, 0.5, 100)
    assert not sharing.is_shared
    trials(sharing, 0.3, 2.0, LAST_TRIAL + 2)
    assert sharing.is_shared


def test_a_trial_that_was_dropped_comes_again() -> None:
    sharing = Sharing()
    sharing.measured(True, 1.0)
    assert sharing.plan()
    sharing.dropped()
    assert sharing.plan()


LEAST = 2


def run(
    exclusion: Exclusion, orders: int, ms: Callable[[int, int], float], parts: Sequence[int]
) -> list[list[int]]:
    """Hold orders of one step with these parts; returns the ranks that had samples in each."""
    had = []
    for _ in range(orders):
        out = exclusion.plan()
        given = [LEAST if rank in exclusion.out else part for rank, part in enumerate(parts)]
        given = [0 if rank in out else part for rank, part in enumerate(given)]
        exclusion.measured(
            given, [ms(rank, count) if count else 0.0 for rank, count in enumerate(given)], LEAST
        )
        had.append([rank for rank, count in enumerate(given) if count])
    return had


def linear(fixed: Sequence[float], by_sample: Sequence[float]) -> Callable[[int, int], float]:
    return lambda rank, samples: fixed[rank] + by_sample[rank] * samples


def test_a_rank_that_can_be_balanced_keeps_its_part() -> None:
    exclusion = Exclusion(2)
    run(exclusion, 50, linear([1.0, 8.0], [0.1, 0.9]), [60, 4])  # 7 and 11.6 ms, and it could have less
    assert not exclusion.out


def test_a_rank_whose_smallest_part_takes_longest_is_left_out_when_it_is_confirmed() -> None:
    exclusion, ms = Exclusion(2), linear([1.0, 9.0], [0.1, 0.4])  # 7.2 and 9.8 ms
    run(exclusion, CONFIRMATIONS - 1, ms, [62, LEAST])
    assert not exclusion.out
    run(exclusion, 1, ms, [62, LEAST])
    assert exclusion.out == {1}


def test_one_slow_order_does_not_leave_a_rank_out() -> None:
    exclusion = Exclusion(2)
    for slow in (9.8, 9.8, 7.0) * 5:
        exclusion.measured([62, LEAST], [7.2, slow], LEAST)
    assert not exclusion.out


def test_it_stays_where_the_others_would_not_be_faster_without_it() -> None:
    exclusion = Exclusion(2)
    run(exclusion, 20, linear([0.0, 5.0], [1.0, 0.5]), [4, LEAST])  # 4 and 6 ms; alone 6 ms
    assert not exclusion.out


@pytest.mark.parametrize("slow", [(20.0, 20.0), (20.0, 14.0), (14.0, 40.0)])
def test_several_slow_ranks_hide_behind_each_other_in_vain(slow: tuple[float, float]) -> None:
    exclusion = Exclusion(4)
    run(exclusion, CONFIRMATIONS, linear([1.0, 1.0, *slow], [0.1] * 4), [30, 30, LEAST, LEAST])
    assert exclusion.out == {2, 3}


def test_it_is_asked_again_at_growing_distances_and_taken_back_when_it_is_fast() -> None:
    exclusion, slow = Exclusion(2), linear([1.0, 9.0], [0.1, 0.4])
    run(exclusion, CONFIRMATIONS, slow, [62, LEAST])
    asked = [order for order, ranks in enumerate(run(exclusion, 200, slow, [62, LEAST])) if 1 in ranks]
    gaps = [two - one for one, two in pairwise(asked)]
    assert asked[0] < 3
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_GAP
    fast = run(exclusion, LONGEST_GAP + 1, linear([1.0, 1.0], [0.1, 0.1]), [62, LEAST])
    assert not exclusion.out
    assert 1 in fast[-1]


def test_one_probe_is_out_at_a_time_and_one_that_tells_nothing_is_repeated() -> None:
    exclusion = Exclusion(2)
    run(exclusion, CONFIRMATIONS + 1, linear([1.0, 9.0], [0.1, 0.4]), [62, LEAST])
    assert [exclusion.plan(), exclusion.plan()] == [frozenset(), {1}]
    exclusion.dropped()
    assert [exclusion.plan(), exclusion.plan()] == [frozenset(), {1}]
