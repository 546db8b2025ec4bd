"""Figures of the slow link: rates of steps that two machines began, and their summary."""

from __future__ import annotations

import pytest

from bench.machines.sides import BATCH, SIDES, options
from bench.machines.slow_link import rate, summary, table


def test_the_rate_is_of_the_later_part_in_which_both_train() -> None:
    # From 0 s to 100 s, and from 10 s to 110 s; ten steps a second until 37 s, then one.
    fast = [index / 10 for index in range(370)]
    slow = [37.0 + index for index in range(80)]
    first = [at for at in fast + slow if at <= 100]
    second = [at for at in fast + slow if 10 <= at <= 110]
    assert rate([first, second]) == pytest.approx(2 * BATCH, rel=0.03)  # counted from 10 + 0.3 * 90 s


def test_sides_are_options_of_a_trainer() -> None:
    assert options("alone")["machines"] is False
    for side in SIDES:
        if side == "alone" or side.startswith("DDP"):
            continue
        given = options(side)
        assert given["machines"].payload == ("bf16" if "bf16" in side else "full")
        assert given["machines"].overlap == ("overlap" in side or not side.startswith("cadence"))
        assert side.startswith(given["policy"])
    assert options("cadence H=50, overlap, bf16")["machines"].rounds == 50


def test_the_summary_compares_with_ddp_and_with_no_link() -> None:
    rows = {
        "alone": [{"samples_per_s": 1000.0}],
        "DDP": [{"samples_per_s": value} for value in (90.0, 100.0, 300.0)],
        "sync": [{"samples_per_s": 50.0}],
    }
    found = summary(rows)
    assert found["DDP"] == {"samples_per_s": 100, "times_ddp": 1, "of_alone": 0.1, "runs": [90, 100, 300]}
    assert (found["sync"]["times_ddp"], found["alone"]["times_ddp"]) == (0.5, 10)
    assert summary({"sync": rows["sync"]})["sync"]["times_ddp"] is None
    lines = table(found).splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["DDP", "100", "1.0", "10", "%", "90", "to", "300"]
