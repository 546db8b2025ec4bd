"""Tests of the GPU checks: they find planted errors; on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.gpu import checks
from bench.gpu.checks import Single, deviation, faults_of
from flowdp.collective import host
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.options import RuntimeOptions

CPU = torch.device("cpu")


def plant(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> None:
    """Replace a method by `fault(own method, *arguments)`."""
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: fault(own, *given))


def test_a_right_run_has_no_faults() -> None:
    assert faults_of([CPU] * 2, stall="optimizer") == []


def test_a_mean_that_leaves_a_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(own: Any, mean: HostMean, rank: int, outcome: Any) -> Any:
        reading = own(mean, rank, outcome)
        if rank == 1:
            mean._replicas[1].memories[0].add_(1e-3)
        return reading

    plant(HostMean, "average", monkeypatch, fault)
    found = faults_of([CPU] * 2, policy="sync")
    assert "replicas differed after round 3" in found
    assert "replicas differed at the end" in found


def test_a_rank_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_of([CPU] * 2, policy="sync", leaver=1) == []
    monkeypatch.setattr(checks, "LEAVES_AT", 10**6)
    assert faults_of([CPU] * 2, policy="sync", leaver=1) == ["rank 1 has not left"]


def test_a_sample_that_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Single.__getitem__
    monkeypatch.setattr(Single, "__getitem__", lambda data, i: own(data, 3 if i == 4 else i))
    found = faults_of([CPU] * 2, is_streamed=True)
    assert f"epoch 0: {checks.COUNT - 1} of {checks.COUNT} samples trained, 1 twice" in found


def test_stalls_are_where_they_shall_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place is reached with the right stream current; on the CPU nothing is delayed there."""
    reached: list[str] = []
    plant(checks.Staller, "at", monkeypatch, lambda own, staller, where: reached.append(where))
    assert faults_of([CPU] * 2, runtime=RuntimeOptions(backend="cpu")) == []
    assert set(reached) == {"backward", "optimizer"}  # the places that a CPU rank has
    with checks.stalled(checks.Staller("averaging")):
        deviation([CPU] * 2, DeviceMean)
        lanes = checks.lanes_of([CPU])
        host._copy(lanes[0], [torch.ones(1)], [torch.ones(1)], (lanes[0].event(), lanes[0].event()))
    assert reached.count("averaging") == 4 + 1


@pytest.mark.parametrize("make", [DeviceMean, lambda flats, lanes: HostMean(flats, lanes, lambda _: None)])
def test_right_means_are_near(make: Any) -> None:
    assert deviation([CPU] * 3, make) < 1e-6


def test_a_mean_without_weights_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome_of = checks.outcome_of

    def equal(round: int, weights: list[int], left: list[int]) -> Any:
        return outcome_of(round, [min(1, weight) for weight in weights], left=left)

    monkeypatch.setattr(checks, "outcome_of", equal)
    assert deviation([CPU] * 2, DeviceMean) > 0.1
