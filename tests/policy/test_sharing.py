"""Steps that are shared by all ranks, or taken by one alone."""

from __future__ import annotations

from itertools import pairwise

from flowdp.policy.sharing import FIRST_TRIAL, LAST_TRIAL, Sharing


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
