"""Rehearsal of two machines on one card, on the CPU: by the hosts' memory, and a machine that hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.machines import one_card

pytestmark = pytest.mark.posix


def test_cases_of_the_host_end_alike_and_exact_is_one_device(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    cases = ["exact, host", "exact, nccl", "cadence, host, overlap"]
    assert one_card.main(["--device", "cpu", "--out", str(out), "--cases", *cases]) == 0
    found = json.loads(out.read_text())["cases"]
    assert list(found) == ["exact, host", "cadence, host, overlap"]  # NCCL needs a card
    assert found["exact, host"]["from_one_device"] < 1e-5
    assert found["exact, host"]["steps"] == one_card.STEPS["cpu"]


def test_machines_that_do_not_end_are_ended() -> None:
    assert one_card.measure("sync, host", "cpu", limit_s=0.01) == {"error": "not over within 0.01 s"}
