"""Pictures in Chromium have the colours of the numbers that they show, pixel by pixel."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flowdp
from flowdp.observe.run_html import run_html
from flowdp.policy.efficiency import PARTS, Activity, RankTimes, efficiency_of
from flowdp.timeline.figure import COLOURS
from flowdp.timeline.page import INTERPRETER
from flowdp.timeline.sampler import GpuReading
from flowdp.timeline.timeline import Timeline
from tests.browser.chromium import open_page
from tests.browser.runs import timed_run
from tests.observe.test_run_html import view
from tests.timeline.pixels import differences, fractions, is_colour
from tests.timeline.test_timeline import ended

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'flowdp[plot]'")

LANES = """() => {
  const canvas = document.getElementById("lanes"), pen = canvas.getContext("2d");
  const pixels = pen.getImageData(0, 0, canvas.width, canvas.height);
  const left = Math.round(label * devicePixelRatio);
  return [canvas.width, canvas.height, left, LANE, LANE + GAP, [...pixels.data]];
}"""

BLUE, ORANGE = "#0072b2", "#d55e00"  # of the first two lines, in the light theme
BLENDED = 80  # with the ground, at the edge of a thin line


def picture(shown: Locator) -> NDArray[np.uint8]:
    """A picture of an element. Shape (height, width, 3 or 4)."""
    from matplotlib.image import imread

    return np.round(255 * imread(io.BytesIO(shown.screenshot()), format="png")).astype(np.uint8)


def lanes_of(page: Page, ranks: int, ratio: float) -> list[NDArray[np.uint8]]:
    """Pixels of the canvas, a part for each rank."""
    width, height, left, lane, distance, numbers = page.evaluate(LANES)
    image = np.array(numbers, dtype=np.uint8).reshape(height, width, 4)
    bottoms = [round((rank * distance + lane) * ratio) for rank in range(ranks)]
    return [image[bottom - round(lane * ratio) : bottom, left:] for bottom in bottoms]


@contextmanager
def shown(browser: Browser, timeline: Timeline, folder: Path, scale: float = 1.0) -> Iterator[Page]:
    """The page of a timeline."""
    timeline.save(folder / "run.html")
    with open_page(browser, scale=scale) as watched:
        watched.page.goto((folder / "run.html").as_uri())
        yield watched.page
        assert watched.complaints == []


@pytest.fixture(scope="module", params=["sync", "exact"])
def run(request: pytest.FixtureRequest) -> flowdp.Run:
    """A run of thousands of spans, far more than pixels."""
    return timed_run(2, policy=request.param, epochs=20)


@pytest.mark.parametrize("scale", [1.0, 1.25, 2.0])
def test_lanes_have_the_colours_of_the_report(
    browser: Browser, run: flowdp.Run, scale: float, tmp_path: Path
) -> None:
    with shown(browser, run.timeline, tmp_path, scale) as page:
        assert differences(lanes_of(page, 2, scale), run) == {}


def test_bars_have_the_colours_of_the_report(browser: Browser, run: flowdp.Run, tmp_path: Path) -> None:
    report = run.report()
    # The parts that its policy has.
    colours = {part: COLOURS[PARTS[part][0]] if PARTS[part] else INTERPRETER for part in report.parts}
    with shown(browser, run.timeline, tmp_path) as page:
        for at, parts in enumerate((report.parts, *(device.parts for device in report.devices))):
            bar = picture(page.locator("#bars .bar").nth(at))
            drawn = fractions(bar[len(bar) // 2 :][:1], colours)
            assert drawn == pytest.approx(dict(parts), abs=0.005)


def test_a_sliver_has_its_part_and_not_a_pixel_of_each_column(browser: Browser, tmp_path: Path) -> None:
    timeline = Timeline(["a"])
    for step in range(10_000):
        begun_s = timeline._begun_s + step * 1e-3
        timeline.ranks[0].add(Activity.STEP, begun_s, begun_s + 9e-4)
        timeline.ranks[0].add(Activity.AVERAGE, begun_s + 9e-4, begun_s + 9.05e-4)
    timeline._ended_s = timeline._begun_s + 10.0
    with shown(browser, timeline, tmp_path) as page:
        drawn = fractions(lanes_of(page, 1, 1.0)[0], {"s": "#0072b2", "a": "#009e73"})
    assert drawn == {"s": pytest.approx(0.9, abs=0.005), "a": pytest.approx(0.005, abs=0.001)}


def test_curves_are_at_their_values(browser: Browser, tmp_path: Path) -> None:
    timeline = Timeline(["a", "b"], {"cuda:0": "GPU-0"})
    for number in range(20):
        timeline.note(ended(number, samples=(6, 2), wall_ms=4.0, anchor=5))
        timeline.sample(2.0, 2**31, [GpuReading(0.5, float(2**30))])
    timeline._ended_s = timeline._begun_s + timeline.rounds[-1].at_ms / 1e3
    # The chart, its top, and the values of its lines.
    charts = (
        ("share", 1.0, (0.75, 0.25)),
        ("rate", 1500.0, (1500.0, 500.0)),
        ("use", 2.0, (2.0, 0.5)),
        ("memory", 2.0, (2.0, 1.0)),
        ("anchor", 5.0, (5.0,)),
    )
    with shown(browser, timeline, tmp_path) as page:
        for name, top, values in charts:
            drawn = picture(page.locator(f"#{name}"))
            for value, colour in zip(values, (BLUE, ORANGE), strict=False):
                rows = np.flatnonzero(is_colour(drawn, colour, within=BLENDED).any(axis=1))
                assert rows.mean() == pytest.approx(6 + (1 - value / top) * 124, abs=1.5), name


def test_the_dashboard_has_bars_of_the_shares(browser: Browser) -> None:
    times = [RankTimes({Activity.STEP: 500.0}, samples, 6, 1000.0) for samples in (60, 30, 10)]
    with open_page(browser) as watched:
        watched.page.set_content(run_html(view(report=efficiency_of(times, "abc"), global_step=50)))
        rows = [picture(row) for row in watched.page.locator(".devices tbody tr").all()][-3:]
        lengths = [is_colour(row, BLUE, within=BLENDED).any(axis=0).sum() for row in rows]
        rail = picture(watched.page.locator(".rail"))
        curve = np.argwhere(is_colour(picture(watched.page.locator("svg")), BLUE, within=BLENDED))
    assert lengths == pytest.approx([66, 33, 11], abs=1.5)
    assert is_colour(rail[3:4], BLUE, within=BLENDED).mean() == pytest.approx(50 / 200, abs=0.01)
    left, right = curve[:, 1].min(), curve[:, 1].max()
    heights = [
        curve[curve[:, 1] == column, 0].mean() for column in (left + 2, (left + right) // 2, right - 2)
    ]
    assert heights == sorted(heights)  # losses of 2 / (1 + n) fall, steeply at first
    whole: Any = heights[2] - heights[0]
    assert (heights[1] - heights[0]) / whole == pytest.approx(0.91, abs=0.05)
