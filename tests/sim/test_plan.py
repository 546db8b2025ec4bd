"""Tests of predictions: the throughput of a mix of devices."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from flowdp.errors import OptionError
from flowdp.options import CadenceOptions, Policy
from flowdp.sim.plan import simulate


def mixes(count: int) -> list[list[float]]:
    """Random mixes of 2 to 8 devices, the slowest 20 ms, at most 4 times slower than the fastest."""
    rng = random.Random(0)
    made = []
    for _ in range(count):
        ratio = rng.uniform(1.0, 4.0)
        made.append([20.0 * rng.uniform(1.0 / ratio, 1.0) for _ in range(rng.randint(2, 8))])
    return made


@pytest.mark.parametrize(("policy", "mean"), [("cadence", 0.98), ("async", 0.99)])
def test_unequal_devices_are_used(policy: Policy, mean: float) -> None:
    """An averaging costs 2 % of a slow step; a run has 250 batches per device."""
    count = 100 if policy == "cadence" else 25
    found = [
        simulate(speeds, sync_ms=0.02 * max(speeds), batches=250 * len(speeds), policy=policy).efficiency
        for speeds in mixes(count)
    ]
    assert fmean(found) >= mean, f"{policy}: {fmean(found):.4f}"
    assert min(found) >= 0.95, f"{policy}: {min(found):.4f}"
    assert max(found) <= 1.0


@pytest.mark.parametrize(("speeds", "least"), [([10, 25], 0.97), ([10] * 4, 0.99), ([10, 10, 20, 40], 0.95)])
def test_windows_are_split_by_speed(speeds: list[float], least: float) -> None:
    plan = simulate(speeds, policy="exact", batches=2000)
    assert plan.efficiency >= least
    fair = [1 / ms / sum(1 / other for other in speeds) for ms in speeds]
    assert plan.shares == pytest.approx(fair, rel=0.05)
    # One step of the run per window, at any speeds.
    assert plan.rounds == 2000 / len(speeds)
    assert plan.steps_per_s == pytest.approx(1e3 * plan.rounds / plan.wall_ms)
    assert plan.samples_per_s == pytest.approx(1e3 * 2000 * 32 / plan.wall_ms)


def test_noise_costs_windows_little() -> None:
    assert simulate([10, 25], policy="exact", batches=2000, noise=0.1).efficiency >= 0.95


def test_fixed_shares_of_windows_are_kept() -> None:
    plan = simulate([10, 10], policy="exact", partition_ratios=[0.75, 0.25], batches=100)
    assert plan.shares == (0.75, 0.25)


def test_lockstep_is_as_slow_as_its_slowest() -> None:
    plan = simulate([10, 20], sync_ms=2, policy="sync", batches=200)
    # A round is 20 ms of the slow rank and 2 ms of averaging: 2 steps in 22 ms.
    assert plan.steps_per_s == pytest.approx(2 / 0.022, rel=0.01)
    assert plan.shares == (0.5, 0.5)
    assert plan.rounds == 100
    assert plan.idle_shares[0] == pytest.approx(12 / 22, rel=0.02)
    assert plan.idle_shares[1] == pytest.approx(2 / 22, rel=0.02)
    assert plan.speedup == pytest.approx(20 / 22, rel=0.02)


def test_shares_follow_speeds() -> None:
    plan = simulate([10, 10, 20], batches=1000)
    assert plan.shares == pytest.approx((0.4, 0.4, 0.2), abs=0.01)
    assert plan.speedup == pytest.approx(2.5, rel=0.02)


def test_one_device_loses_nothing() -> None:
    plan = simulate([10], sync_ms=5)
    assert plan.efficiency == pytest.approx(1.0, abs=0.001)
    assert plan.speedup == pytest.approx(1.0, abs=0.001)


def test_costly_averaging_raises_the_anchor() -> None:
    cheap, costly = simulate([10, 15], sync_ms=1), simulate([10, 15], sync_ms=60)
    assert cheap.anchor == 10
    assert costly.anchor == 40  # 60 ms are a tenth of 40 steps of 15 ms
    assert costly.rounds < cheap.rounds
    pinned = simulate([10, 15], sync_ms=60, cadence=CadenceOptions(max_anchor=10))
    assert pinned.anchor == 10
    assert pinned.efficiency < costly.efficiency


def test_fixed_shares_are_kept() -> None:
    plan = simulate([10, 10], partition_ratios=[0.75, 0.25], batches=1000)
    assert plan.shares == pytest.approx((0.75, 0.25), abs=0.02)
    assert plan.idle_shares[1] > 0.6


def test_figures_agree_with_each_other() -> None:
    plan = simulate([12, 28], sync_ms=9, per_device_batch_size=16, epochs=2, noise=0.1, seed=3)
    assert plan.samples_per_s == pytest.approx(16 * plan.steps_per_s)
    assert plan.steps_per_s * plan.wall_ms / 1e3 == pytest.approx(2000)
    assert plan.efficiency == pytest.approx(plan.steps_per_s / (1e3 / 12 + 1e3 / 28))
    assert plan == simulate([12, 28], sync_ms=9, per_device_batch_size=16, epochs=2, noise=0.1, seed=3)
    assert plan != simulate([12, 28], sync_ms=9, per_device_batch_size=16, epochs=2, noise=0.1, seed=4)


def test_prints_as_a_table() -> None:
    lines = str(simulate([10, 20], policy="sync", batches=200)).splitlines()
    assert lines == [
        "rank   ms/step   share  waiting",
        "   0        10  50.0 %   50.0 %",
        "   1        20  50.0 %    0.0 %",
        "sync: 100.0 steps/s, 3,199 samples/s, 66.7 % of these devices, 1.00 x the fastest alone",
        "100 rounds of 1 steps of the slowest in 2.0s, 0 ms of averaging each",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"speeds": []}, "speeds must be"),
        ({"speeds": [10, 0]}, "speeds must be"),
        ({"speeds": [float("nan")]}, "speeds must be"),
        ({"speeds": [10, float("inf")]}, "speeds must be"),
        ({"sync_ms": -1.0}, "sync_ms must be"),
        ({"policy": "fast"}, "policy must be one of"),
        ({"noise": 1.0}, "noise must lie"),
        ({"per_device_batch_size": [8, 16]}, "per_device_batch_size must be"),
        ({"batches": 2.5}, "batches must be"),
        ({"epochs": True}, "epochs must be"),
        ({"partition_ratios": [1.0]}, "one for each device"),
        ({"partition_ratios": [1.0, 0.0]}, "must be positive"),
        ({"partition_ratios": [0.5, 0.5], "policy": "sync"}, "all shares are equal"),
        ({"cadence": CadenceOptions(speed_hint=(5, 2.0))}, "speed_hint names rank 5"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        simulate(**{"speeds": [10, 20], **arguments})  # type: ignore[arg-type]
