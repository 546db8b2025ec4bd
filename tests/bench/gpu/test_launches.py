"""Tests of the launch part with measured rates in place of processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from bench.gpu import launches
from bench.gpu.part import Figure, Note, Place
from bench.micro import launch

CPU = Place(torch.device("cpu"))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Cases that cannot be opened; the others take 10 steps a second for each rank, flowdp 8."""
    refused: set[tuple[str, int]] = set()

    def open_sides(
        _stack: ExitStack, _task: Any, names: Sequence[str], ranks: Sequence[int]
    ) -> dict[Any, Any]:
        return {(name, count): None for name in names for count in ranks if (name, count) not in refused}

    def measure(sides: dict[Any, Any], _turns: int, _seconds: float) -> dict[Any, list[float]]:
        return {case: [(10 if case[0] == launch.PROCESSES else 8) * case[1]] for case in sides}

    monkeypatch.setattr(launch, "open_sides", open_sides)
    monkeypatch.setattr(launch, "measure", measure)
    return refused


def test_figures_are_rates_and_ratios(failing: set[tuple[str, int]]) -> None:
    found = {f.name: f.value for f in launches.measure(CPU) if isinstance(f, Figure)}
    assert found == {
        "launches: processes, 1 rank, steps/s": 10,
        "launches: flowdp, 1 rank, steps/s": 8,
        "launches: flowdp, 1 rank, times processes": 0.8,
        "launches: processes, 2 ranks, steps/s": 20,
        "launches: processes, 2 ranks, times 1 rank": 2,
        "launches: flowdp, 2 ranks, steps/s": 16,
        "launches: flowdp, 2 ranks, times 1 rank": 2,
        "launches: flowdp, 2 ranks, times processes": 0.8,
    }


def test_a_variant_that_fails_is_named_and_the_others_go_on(failing: set[tuple[str, int]]) -> None:
    failing.add(("processes", 1))
    found = list(launches.measure(CPU))
    assert found[0] == Note("launches: processes, 1 rank failed; see the log")
    assert Figure("launches: flowdp, 2 ranks, times 1 rank", 2) in found


def test_without_any_rate_the_part_fails(failing: set[tuple[str, int]]) -> None:
    failing |= {(name, count) for name in ("processes", "flowdp") for count in (1, 2)}
    with pytest.raises(RuntimeError, match="no variant could be measured"):
        list(launches.measure(CPU))
