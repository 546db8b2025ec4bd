"""Tests of unequal ranks on the CPU, where the second one sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.gpu import partitions, unequal
from bench.gpu.part import Figure, Finding, Note, Place
from bench.gpu.unequal import DDP, POLICIES, RATIO, WAITS, Unequal, open_unequal
from flowdp.device.streams import HostLane
from flowdp.replica import build
from tests.data.cards import Card

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


def until_error() -> tuple[list[Finding], str]:
    """The findings, and the error behind them."""
    found: list[Finding] = []
    try:
        for finding in unequal.measure(CPU):
            found.append(finding)  # noqa: PERF402  # what came before an error is kept
    except RuntimeError as error:
        return found, str(error)
    return found, ""


def test_figures_are_fractions_of_the_sum_and_times_ddp(rates: dict[str, float]) -> None:
    found = list(unequal.measure(CPU))
    assert Note("unequal: the ranks are made unequal by waits") in found
    seen = figures(found)
    assert seen["unequal, plain loops in threads, rank 1 beside the other, samples/s"] == 34.0
    assert seen["unequal, exact: fraction of the sum of the speeds"] == 0.75
    assert seen[f"unequal, {DDP}: fraction of the sum of the speeds"] == 0.24
    assert seen[f"unequal, {DDP}: fraction of the sum of the processes' speeds"] == 0.48
    assert seen[f"unequal, cadence: times {DDP}"] == 75.0 / 24.0


def test_a_policy_that_fails_is_named_and_the_others_go_on(rates: dict[str, float]) -> None:
    del rates["cadence"]
    found, error = until_error()
    assert Note("unequal, cadence: KeyError: 'cadence'") in found
    assert "unequal, sync: samples/s" in figures(found)
    assert "unequal, cadence: KeyError" in error


def test_ddp_that_fails_takes_only_its_own_figures(
    rates: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("not over within 60 s")

    monkeypatch.setattr(unequal, "ddp_rates", failing)
    found, error = until_error()
    assert error == f"unequal, {DDP}: not over within 60 s"
    assert "unequal, sync: samples/s" in figures(found)


def test_a_rank_that_waits_is_slower_by_the_ratio() -> None:
    ranks, refused = open_unequal(CPU)
    assert (ranks.kind, refused) == (WAITS, [])
    first, second = ranks.waits
    assert second == pytest.approx(RATIO * first)
    alone, beside = unequal.speeds(ranks, 0.2)
    assert alone[0] > alone[1]
    assert min(beside) > 0


def test_where_no_part_can_be_made_it_says_why_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> Any:
        raise RuntimeError("this driver has no cuGreenCtxCreate")

    class Card(Place):
        is_cuda = True

    monkeypatch.setattr(partitions, "SPLITS", {"green contexts": refusing})
    monkeypatch.setattr(unequal, "timed_ms", lambda *_, **__: 5.0)
    ranks, refused = open_unequal(Card(CPU.device))
    assert ranks.kind == WAITS
    assert refused == ["green contexts: RuntimeError: this driver has no cuGreenCtxCreate"]
    assert ranks.waits[0] * ranks.size.batch == 10_000_000  # cycles of 5 ms


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


class Part:
    """Part of a fake card; counts its streams."""

    multiprocessors = 44

    def __init__(self, card: Card) -> None:
        self.card, self.streams = card, 0

    def stream(self, priority: int) -> Any:
        self.streams += 1
        return self.card.Stream(CPU.device, priority)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_trains_on_the_streams_of_parts(name: str) -> None:
    """A run takes everything but its streams from the module of the card."""
    card = Card()
    parts = [Part(card), Part(card)]
    lanes = partitions.lanes_on(CPU.device, parts, card)
    ranks = Unequal(CPU, "parts of a fake card", lanes, unequal.TINY)
    assert unequal.policy_rate(ranks, name, 0.1, 0.2) > 0
    assert min(part.streams for part in parts) >= 3
    assert card.races == []


@pytest.mark.posix
def test_ddp_runs_in_two_processes() -> None:
    ranks, _ = open_unequal(CPU)
    first, second = unequal.ddp_rates(ranks, 0.2, limit_s=120)
    assert first.keys() == second.keys() == {"alone", "beside", "ddp"}
    assert min(*first.values(), *second.values()) > 0


@pytest.mark.posix
def test_processes_of_ddp_that_fail_are_named() -> None:
    ranks, _ = open_unequal(CPU)
    ranks.kind = "no such kind"
    with pytest.raises(RuntimeError, match="the processes ended with exit codes"):
        unequal.ddp_rates(ranks, 0.2, limit_s=120)
