"""Tests of the decision whether captured steps pay."""

from __future__ import annotations

import pytest

from flowdp.policy.capture_plan import SETTLED, WATCHED, LaunchWatch


@pytest.mark.parametrize(("device_ms", "is_behind"), [(1.0, True), (1.09, True), (1.5, False)])
def test_a_host_is_behind_where_the_device_ends_with_its_launches(device_ms: float, is_behind: bool) -> None:
    watch = LaunchWatch()
    for number in range(WATCHED):
        assert watch.is_behind is None
        watch.take(1.0, 100.0 if number < SETTLED else device_ms)
    assert watch.is_behind is is_behind
    assert (watch.launch_ms, watch.device_ms) == (1.0, device_ms)
    watch.take(1.0, 100.0)
    assert watch.is_behind is is_behind
