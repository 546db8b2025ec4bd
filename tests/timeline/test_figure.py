"""The figure of a timeline has the colours of its report, pixel by pixel."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flowdp.policy.efficiency import Activity
from flowdp.timeline.figure import COLOURS
from flowdp.timeline.timeline import Timeline
from tests.browser.runs import timed_run
from tests.timeline.pixels import differences, fractions, is_colour
from tests.timeline.test_timeline import ended

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'flowdp[plot]'")


def pixels_of(figure: Any) -> NDArray[np.uint8]:
    """The picture of a figure. Shape (height, width, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def lane_of(image: NDArray[np.uint8], axes: Any, rank: int) -> NDArray[np.uint8]:
    """The part of the picture in which a rank's lane lies."""
    left, right = axes.get_xlim()
    (x0, y0), (x1, y1) = axes.transData.transform([(left, rank + 0.4), (right, rank - 0.4)])
    height = len(image)
    return image[height - int(y1) + 1 : height - int(y0) - 1, int(x0) + 1 : int(x1) - 1]


@pytest.mark.parametrize("policy", ["sync", "exact", "cadence"])
def test_a_lane_has_the_colours_of_the_report(policy: str) -> None:
    run = timed_run(2, policy=policy, epochs=20)  # of thousands of spans, far more than pixels
    figure = run.timeline.plot()
    image = pixels_of(figure)
    lanes = [lane_of(image, figure.axes[0], rank) for rank in range(2)]
    assert differences(lanes, run) == {}


def test_a_million_spans_that_were_merged_have_their_part() -> None:
    timeline = Timeline(["a"])
    for step in range(300_000):
        begun_s = timeline._begun_s + step * 1e-3
        timeline.ranks[0].add(Activity.STEP, begun_s, begun_s + 6e-4)
        timeline.ranks[0].add(Activity.GATE, begun_s + 6e-4, begun_s + 9e-4)
    timeline._ended_s = timeline._begun_s + 300.0
    figure = timeline.plot()
    drawn = fractions(lane_of(pixels_of(figure), figure.axes[0], 0), {"s": "#0072b2", "w": "#d55e00"})
    assert drawn == {"s": pytest.approx(0.6, abs=0.02), "w": pytest.approx(0.3, abs=0.02)}


def test_a_span_is_where_and_as_long_as_it_was() -> None:
    timeline = Timeline(["a", "b"])
    timeline.ranks[1].add(Activity.SAVE, timeline._begun_s + 2.0, timeline._begun_s + 3.0)
    timeline._ended_s = timeline._begun_s + 10.0
    figure = timeline.plot()
    image = pixels_of(figure)
    other, own = (is_colour(lane_of(image, figure.axes[0], rank), COLOURS[Activity.SAVE]) for rank in (0, 1))
    assert not other.any()
    assert own.mean() == pytest.approx(0.1, abs=0.01)
    assert np.flatnonzero(own.any(axis=0)).mean() / own.shape[1] == pytest.approx(0.25, abs=0.01)


def test_the_curves_are_at_their_values() -> None:
    timeline = Timeline(["a", "b"])
    for number in range(50):
        timeline.note(ended(number, samples=(6, 2), wall_ms=4.0, loss=1.0 if number < 25 else 3.0))
    timeline._ended_s = perf_counter()  # importing matplotlib takes longer than these rounds
    figure = timeline.plot()
    _, loss, rate = figure.axes
    assert sorted(set(loss.lines[0].get_ydata())) == [1.0, 3.0]
    assert [set(line.get_ydata()) for line in rate.lines] == [{1500.0}, {500.0}]
    image = pixels_of(figure)
    for line, colour in zip(rate.lines, ("#1f77b4", "#ff7f0e"), strict=True):
        _, y = rate.transData.transform((0.0, line.get_ydata()[0]))
        first = len(image) - int(rate.bbox.y1)  # row of the axes' upper edge
        drawn = np.argwhere(is_colour(image[first:], colour, within=40))
        assert first + drawn[:, 0].mean() == pytest.approx(len(image) - y, abs=1.0)
