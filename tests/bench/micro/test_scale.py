"""Tests of the bench of scale: its counts, its efficiencies, and the page that it writes."""

from __future__ import annotations

import pytest

from bench.micro import scale


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


def test_the_page_is_that_of_the_record() -> None:
    newest = scale.newest()
    _, _, rest = scale.PAGE.read_text(encoding="utf-8").partition(scale.BEGIN)
    table, _, _ = rest.partition(scale.END)
    assert table.strip() == scale.tables(newest).strip()
    assert f"scale, {newest['date']}, {newest['commit']}" in scale.PICTURE.read_text(encoding="utf-8")
