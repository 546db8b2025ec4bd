"""A crowd is more threads than cores, for longer than a moment."""

from __future__ import annotations

import pytest

from flowdp.policy.crowd import CALM, CROWDED, Crowd


@pytest.mark.parametrize(("running", "is_there"), [(0, False), (4, False), (5, True)])
def test_the_first_look_counts(running: int, is_there: bool) -> None:
    assert Crowd(4, running).is_there is is_there


def test_a_moment_is_no_crowd() -> None:
    crowd = Crowd(4, 1)
    for _ in range(5):
        assert not any(crowd.look(9) for _ in range(CROWDED - 1))
        assert not crowd.look(4)


def test_a_crowd_comes_and_goes() -> None:
    crowd = Crowd(4, 1)
    assert [crowd.look(9) for _ in range(CROWDED)] == [False] * (CROWDED - 1) + [True]
    for _ in range(5):
        assert all(crowd.look(1) for _ in range(CALM - 1))
        assert crowd.look(9)
    assert [crowd.look(1) for _ in range(CALM)] == [True] * (CALM - 1) + [False]
