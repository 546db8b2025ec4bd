"""Tests of the attribution of a run's time."""

from __future__ import annotations

import pytest

from flowdp.policy.efficiency import PARTS, Activity, RankTimes, efficiency_of

FAST = {Activity.STEP: 600.0, Activity.GATE: 300.0, Activity.AVERAGE: 50.0, Activity.DATA: 20.0}
SLOW = {Activity.STEP: 900.0, Activity.GATE: 10.0, Activity.AVERAGE: 50.0, Activity.EVALUATE: 40.0}


def test_the_parts_of_each_device_and_of_all_sum_to_one() -> None:
    ranks = [RankTimes(dict(FAST), 600, 60, 1000.0), RankTimes(dict(SLOW), 300, 30, 1000.0)]
    report = efficiency_of(ranks, ["a", "b"])
    for parts in (report.parts, *(one.parts for one in report.devices)):
        assert list(parts) == [part for part in PARTS if part != "your code"]
        assert sum(parts.values()) == pytest.approx(1.0)
    assert report.devices[0].parts["interpreter"] == pytest.approx(0.03)


def test_lost_samples_and_those_reached_are_the_ideal() -> None:
    ranks = [RankTimes(dict(FAST), 600, 60, 1000.0), RankTimes(dict(SLOW), 300, 30, 1000.0)]
    report = efficiency_of(ranks, ["a", "b"])
    assert (report.devices[0].ideal, report.devices[1].ideal) == (1000.0, pytest.approx(1000 / 3))
    assert report.reached == pytest.approx(900.0)
    assert report.efficiency == pytest.approx(report.reached / report.ideal)
    # 0.3 s of a device of 1,000 samples/s and 0.01 s of one of 333 are lost to waiting.
    assert report.parts["waiting for others"] * report.ideal == pytest.approx(300 + 10 / 3)


def test_a_rank_that_left_is_idle_afterwards() -> None:
    ranks = [
        RankTimes({Activity.STEP: 1000.0}, 100, 10, 1000.0),
        RankTimes({Activity.STEP: 250.0}, 100, 10, 250.0),
    ]
    left = efficiency_of(ranks, ["a", "b"]).devices[1]
    assert left.parts["idle"] == pytest.approx(0.75)
    assert (left.ideal, left.reached) == (400.0, 100.0)


def test_as_text_and_as_html() -> None:
    names = ["cuda:0", "<b>"]
    report = efficiency_of([RankTimes(dict(FAST), 600, 60, 1000.0)] * 2, names)
    lines = str(report).splitlines()
    assert lines[0] == "1,200 samples/s, 60.0 % of the speed in their steps (2,000), in 1.0s"
    assert lines[2].split() == ["all", *names]
    assert lines[3].split() == ["training", *["60.0", "%"] * 3]
    table = lines[2 : lines.index("", 2)]
    assert len({len(line) for line in table}) == 1
    # Parts that took nobody's time are left out.
    spent = [part for part, share in report.parts.items() if share]
    assert [line.rpartition("  ")[0].split("  ")[0] for line in table[1:]] == spent
    assert len(spent) < len(report.parts)
    html = report._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count("60.0 %") == 4


def test_a_large_part_of_a_device_has_a_line_below_the_table() -> None:
    lone = RankTimes({Activity.STEP: 950.0, Activity.DATA: 50.0}, 900, 90, 1000.0)
    other = RankTimes({Activity.STEP: 480.0, Activity.LEFT_OUT: 520.0}, 100, 10, 1000.0)
    report = efficiency_of([lone, other], ["a", "b"])
    assert report.devices[1].parts["left out"] == pytest.approx(0.52)
    (note,) = report.notes
    assert note.startswith("left out: it had no samples")
    assert str(report).endswith(f"\n\n{note}")
    assert note in report._repr_html_()


def test_without_a_sample_it_is_one_line() -> None:
    report = efficiency_of([RankTimes(wall_ms=40.0), RankTimes(wall_ms=40.0)], ["cpu", "cpu"])
    assert str(report) == "no samples were trained in 40ms"
