"""Tests of values with several elements."""

from __future__ import annotations

import pytest

from flowdp.policy.metric_array import MetricArray


@pytest.mark.parametrize(
    ("shape", "values", "nested"),
    [
        ((3,), (1.0, 2.0, 3.0), [1.0, 2.0, 3.0]),
        ((2, 3), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        ((2, 1, 2), (1.0, 2.0, 3.0, 4.0), [[[1.0, 2.0]], [[3.0, 4.0]]]),
        ((0,), (), []),
        ((0, 2), (), []),
    ],
)
def test_nested_lists(shape: tuple[int, ...], values: tuple[float, ...], nested: object) -> None:
    assert MetricArray(shape, values).tolist() == nested


def test_it_prints_its_shape_alone() -> None:
    assert repr(MetricArray((10, 10), (0.0,) * 100)) == "<MetricArray 10 x 10>"
