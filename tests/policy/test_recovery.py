"""Tests of outliers, and of ranks without work."""

from __future__ import annotations

import pytest

from flowdp.policy.recovery import LONGEST_GAP, OutlierFilter, Probes


def test_a_measurement_near_the_known_pace_counts() -> None:
    outliers = OutlierFilter(2)
    for ms in (5.1, 20.0, 79.0):
        assert outliers.confirmed(1, ms, 1, known_ms=20.0) == ms
    assert not outliers.is_holding(1)


@pytest.mark.parametrize(("first", "second", "counts"), [(2000.0, 200.0, 200.0), (0.1, 1.0, 1.0)])
def test_of_two_outliers_in_a_row_the_nearer_one_counts(first: float, second: float, counts: float) -> None:
    for pair in ((first, second), (second, first)):
        outliers = OutlierFilter(1)
        assert outliers.confirmed(0, pair[0], 1, known_ms=20.0) == 0.0
        assert outliers.is_holding(0)
        # A round without a measurement neither confirms nor rejects it.
        assert outliers.confirmed(0, 0.0, 0, known_ms=20.0) == 0.0
        assert outliers.confirmed(0, pair[1], 1, known_ms=20.0) == counts
        assert not outliers.is_holding(0)


def test_several_fast_steps_are_no_accident() -> None:
    assert OutlierFilter(1).confirmed(0, 20.0, 3, known_ms=2000.0) == 20.0
    assert OutlierFilter(1).confirmed(0, 2000.0, 30, known_ms=20.0) == 0.0


# ---------------------------------------------------------------- probes
def rounds_of_probes(rounds: int, *, answers: bool) -> list[int]:
    """Rounds in which rank 1, without other work, is due; `answers`: whether it takes the steps."""
    probes = Probes(2)
    found = []
    steps = 1
    for number in range(rounds):
        probes.held((8, steps))
        steps = int(answers and 1 in probes.due)
        if 1 in probes.due:
            found.append(number)
        assert 0 not in probes.due
    return found


@pytest.mark.parametrize("answers", [False, True])
def test_the_gaps_between_probes_double(answers: bool) -> None:
    found = rounds_of_probes(200, answers=answers)
    gaps = [later - earlier for earlier, later in zip([0, *found], found, strict=False)]
    assert gaps == [1, 2, 4, 8, 16, *[LONGEST_GAP] * 5]


def test_work_without_a_probe_ends_the_counting() -> None:
    probes = Probes(2)
    for steps in (0, 0, 0):
        probes.held((8, steps))
    assert probes.due == (1,)
    probes.held((8, 1))  # the probe
    probes.held((8, 2))
    probes.held((8, 0))
    assert probes.due == (1,)


def test_an_outlier_is_followed_up_at_once() -> None:
    probes = Probes(2)
    for _ in range(15):
        probes.held((8, 0))
    assert probes.due == (1,)
    probes.held((8, 1), doubted=[1])
    assert probes.due == ()
    probes.held((8, 0), doubted=[1])
    assert probes.due == (1,)


def test_paces_of_another_run_are_probed_in_the_first_round() -> None:
    probes = Probes(3)
    assert probes.due == ()
    probes.start()
    assert probes.due == (0, 1, 2)
    probes.held((1, 1, 1))
    assert probes.due == ()
