from __future__ import annotations

import pytest

from bench.micro.checkpoint_throughput import comparisons


def test_each_interval_is_compared_with_its_own_neighbours() -> None:
    turns = [
        {"every": 20, "with": 90.0, "without": 100.0, "files": 1},
        {"every": 1, "with": 98.0, "without": 100.0, "files": 2},
        {"every": 20, "with": 190.0, "without": 200.0, "files": 1},
    ]
    first, second = comparisons("small, sync", turns)
    assert (first.label, first.ratio) == ("small, sync, every=1", pytest.approx(0.98))
    assert (second.label, second.a, second.b) == ("small, sync, every=20", (90.0, 190.0), (100.0, 200.0))
