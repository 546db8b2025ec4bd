"""Tests of the kill bench: killed training resumes where it was, and wrong outcomes are found."""

from __future__ import annotations

from typing import Any

import pytest

from bench.reliability import kill as bench
from bench.reliability.kill import POINTS, kill
from bench.reliability.lives import Aim, Plan
from flowdp.trainer.resume import Resumed

SECOND = Aim("sync folder", write=2)


def test_random_kills() -> None:
    report = kill(6, seed=1)
    assert report.faults == []
    assert report.hits.total() == 6
    assert report.counts["resumes"] > 0


def test_killed_before_each_call_of_a_write() -> None:
    report = kill(len(POINTS), plans=[Plan("sync")], aims=[Aim(point, write=1) for point in POINTS])
    assert report.faults == []
    assert report.hits == dict.fromkeys(POINTS, 1)
    assert report.counts["resumes"] == 3  # the first life to leave a checkpoint dies before the fourth call
    assert report.counts["runs that ended with the bits of one never killed"] == 1
    # Before the first call there is no file; before the last one it has its final name.
    assert report.counts["unfinished files, whole"] == 2
    assert report.counts["unfinished files, torn"] == 0


@pytest.mark.parametrize("policy", ["exact", "cadence"])
def test_a_model_that_is_not_put_back_is_seen(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resumed, "put_back", lambda *_: None)
    faults = kill(1, plans=[Plan(policy)], aims=[Aim("sync folder", write=1)]).faults
    assert any("do not agree with" in fault for fault in faults)
    assert any("samples per epoch and per sample" in fault for fault in faults)
    assert any("never killed" in fault for fault in faults) == (policy in ("sync", "exact"))


def test_after_a_cut_power_the_torn_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TORN_EVERY", 1)
    report = kill(3, seed=2, plans=[Plan("exact")], aims=[SECOND] * 3)
    assert report.faults == []
    assert report.counts["torn files put there"] > 0
    assert report.counts["torn files refused"] > 0
