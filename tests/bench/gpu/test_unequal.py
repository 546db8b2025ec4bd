"""Tests of unequal ranks on the CPU, where the second one sleeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu import unequal
from bench.gpu.part import Figure, Finding, Note, Place
from bench.gpu.unequal import DDP, POLICIES, RATIO, WAITS, Unequal, open_unequal
from flowdp.device.streams import HostLane
from flowdp.replica import build

CPU = Place(torch.device("cpu"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rates of the policies, in place of runs; one that is not there fails."""
    given = dict.fromkeys(POLICIES, 75.0)
    processes = [{"alone": 60.0, "beside": 30.0, "ddp": 25.0}, {"alone": 30.0, "beside": 20.0, "ddp": 24.0}]
    monkeypatch.setattr(unequal, "speeds", lambda *_: ([70.0, 35.0], [66.0, 34.0]))
    monkeypatch.setattr(unequal, "policy_rate", lambda ranks, name, *_: given[name])
    monkeypatch.setattr(unequal, "ddp_rates", lambda *_: processes)
    return given


def figures(findings: list[Finding]) -> dict[str, float]:
    return {one.name: one.value for one in findings if isinstance(one, Figure)}


def test_figures_are_fractions_of_the_sum_and_times_ddp(rates: dict[str, float]) -> None:
    found = list(unequal.measure(CPU))
    assert Note("unequal: the ranks are made unequal by waits") in found
    seen = figures(found)
    assert seen["unequal, plain loops in threads, rank 1 beside the other, samples/s"] == 34.0
    assert seen["unequal, exact: fraction of the sum of the speeds"] == 0.75
    assert seen[f"unequal, {DDP}: fraction of the sum of the speeds"] == 0.24
    assert seen[f"unequal, {DDP}: fraction of the sum of the processes' speeds"] == 0.48
    assert seen[f"unequal, cadence: times {DDP}"] == 75.0 / 24.0


def test_a_rank_that_waits_is_slower_by_the_ratio() -> None:
    ranks, refused = open_unequal(CPU)
    assert (ranks.kind, refused) == (WAITS, [])
    first, second = ranks.waits
    assert second == pytest.approx(RATIO * first)
    alone, beside = unequal.speeds(ranks, 0.2)
    assert alone[0] > alone[1]
    assert min(beside) > 0


def test_a_run_has_the_given_lanes() -> None:
    lanes = [HostLane(CPU.device), HostLane(CPU.device)]
    ranks = Unequal(CPU, WAITS, lanes, unequal.TINY)
    with ranks.in_use():
        assert build.open_lanes([CPU.device] * 2) == lanes  # type: ignore[attr-defined]
    assert build.open_lanes([CPU.device] * 2) != lanes  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_trains_on_both_ranks(name: str) -> None:
    ranks, _ = open_unequal(CPU)
    assert unequal.policy_rate(ranks, name, 0.1, 0.2) > 0


@pytest.mark.posix
def test_ddp_runs_in_two_processes() -> None:
    ranks, _ = open_unequal(CPU)
    first, second = unequal.ddp_rates(ranks, 0.2, limit_s=120)
    assert first.keys() == second.keys() == {"alone", "beside", "ddp"}
    assert min(*first.values(), *second.values()) > 0
