"""Tests of the part with two machines on one card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu import machines, programme
from bench.gpu.part import Figure, Finding, Note, Place

CARD = Place(torch.device("cuda", 0))


def test_a_case_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: str, device: str, limit_s: float) -> dict[str, Any]:
        assert device == "cuda:0"
        return {"error": "not over within 25 s"} if case == "exact, nccl" else {"step_ms": 2.0}

    monkeypatch.setattr(machines.one_card, "measure", measure)
    found: list[Finding] = []
    with pytest.raises(RuntimeError, match="exact, nccl: not over within 25 s"):
        found.extend(machines.measure(CARD))
    assert Figure("two machines on one card, cadence, nccl: step, ms", 2.0) in found
    assert Note("two machines on one card, exact, nccl: not over within 25 s") in found


def test_the_cases_are_there_and_over_before_the_part() -> None:
    assert set(machines.CASES) <= machines.one_card.CASES.keys()
    assert len(machines.CASES) * machines.LIMIT_S < programme.PARTS["machines"].limit_s
