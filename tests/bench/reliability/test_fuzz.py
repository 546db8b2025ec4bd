"""Tests of the fuzzer: mutated checkpoints are read or refused, and other outcomes are found."""

from __future__ import annotations

import zipfile

import pytest

from bench.reliability.fuzz import fuzz


def test_mutations_are_read_or_refused() -> None:
    report = fuzz(300)
    assert report.failures == []
    assert sum(report.counts.values()) == 300
    assert report.counts["refused"] > 200
    assert report.counts["read with other values"] > 0


def test_a_checksum_that_nobody_looks_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: None)
    report = fuzz(200)
    assert report.failures
    assert all("checksum was not noticed" in happened for _, happened in report.failures)
