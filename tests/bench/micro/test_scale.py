"""Tests of the bench of scale: its counts, its efficiencies, and the page that it writes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.micro import scale
from flowdp.options import Policy


@pytest.mark.parametrize(("policy", "steps", "rounds"), [("sync", 8, 4), ("exact", 8, 4)])
def test_steps_are_those_of_all_ranks(policy: Policy, steps: int, rounds: int) -> None:
    [cost] = scale.coordinator_costs([2], 1, [policy], steps=4)
    assert (cost.steps, cost.rounds) == (steps, rounds)
    assert cost.us_per_round == pytest.approx(cost.us_per_step * steps / rounds)
    assert cost.us_per_step > 0.0


def test_efficiency_is_the_throughput_over_that_of_the_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "NOISE", 0.0)
    # All wait for the slowest: at 10 and 25 ms, 2 steps in 25 ms where the devices alone take 3.5. Messages
    # take a little time, too.
    found = scale.efficiency("sync", "1 : 2.5", "0", 2, steps=8)
    assert found.efficiency == pytest.approx(2 / 3.5, rel=0.01)
    found = scale.efficiency("sync", "equal", "100 %", 2, steps=8)
    assert found.efficiency == pytest.approx(0.5, rel=0.01)
    # The averaging takes as many tenths of a step as the ranks double from one.
    found = scale.efficiency("sync", "equal", "10 % x log2", 4, steps=8)
    assert found.efficiency == pytest.approx(1 / 1.2, rel=0.01)


def record() -> dict[str, Any]:
    """A record in which every figure is that of its own number of ranks."""
    efficiencies = [
        {"policy": policy, "mix": mix, "averaging": averaging, "ranks": ranks, "efficiency": ranks / 1024}
        for policy in scale.POLICIES
        for mix in scale.MIXES
        for averaging in scale.AVERAGING
        for ranks in scale.RANKS
    ]
    costs = [
        {"policy": policy, "ranks": ranks, "us_per_step": ranks, "us_per_round": 1000 * ranks}
        for policy in scale.POLICIES
        for ranks in scale.COST_RANKS
    ]
    return {
        "date": "2026-01-01",
        "commit": "abc",
        "machine": {"cpu": "a processor"},
        "costs": costs,
        "efficiencies": efficiencies,
    }


def test_the_page_is_that_of_the_record() -> None:
    newest = scale.newest()
    _, _, rest = scale.PAGE.read_text(encoding="utf-8").partition(scale.BEGIN)
    table, _, _ = rest.partition(scale.END)
    assert table.strip() == scale.tables(newest).strip()
    assert f"scale, {newest['date']}, {newest['commit']}" in scale.PICTURE.read_text(encoding="utf-8")
