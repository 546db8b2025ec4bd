"""The page of a timeline in Chromium: drawn in full, readable, steered by mouse, and silent."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from flowdp.observe.run_html import run_html
from flowdp.policy.efficiency import Activity, RankTimes, efficiency_of
from flowdp.timeline.sampler import UNKNOWN
from flowdp.timeline.timeline import Timeline
from tests.browser.chromium import WatchedPage, open_page
from tests.browser.runs import timed_run
from tests.observe.test_run_html import view
from tests.observe.test_tables import epoch
from tests.timeline.hostile import HOSTILE
from tests.timeline.test_timeline import ended

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")

CHARTS = ["loss", "rate", "share", "anchor", "use", "memory"]

# Colours of the canvas, and the drawn size of each chart's longest line.
DRAWN = """charts => {
  const canvas = document.getElementById("lanes");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set(new Uint32Array(pixels.buffer));
  const size = path => { const box = path.getBoundingClientRect(); return box.width + box.height; };
  const lines = id => [...document.querySelectorAll(`#${id} path`)];
  return [colours.size, ...charts.map(id => Math.max(0, ...lines(id).map(size)))];
}"""

WIDTHS = """() => [document.documentElement, ...document.querySelectorAll("section")]
  .map(one => one.scrollWidth - one.clientWidth)"""

# Contrast of the lines and of the text with the card that they lie on. Source: WCAG 2.2, 1.4.11 and 1.4.3.
CONTRASTS = """() => {
  const light = colour => {
    const [r, g, b] = colour.match(/\\d+/g).map(one => one / 255).map(
      one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const card = light(getComputedStyle(document.querySelector("section")).backgroundColor);
  const against = one => (Math.max(one, card) + .05) / (Math.min(one, card) + .05);
  const least = (query, name) => Math.min(
    ...[...document.querySelectorAll(query)].map(one => against(light(getComputedStyle(one)[name]))));
  return [least("svg path", "stroke"), Math.min(least("svg text", "fill"), least(".key, td, th", "color"))];
}"""


def page_of(devices: int, folder: Path) -> Path:
    path = folder / "run.html"
    timed_run(devices).timeline.save(path)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run on two devices."""
    return page_of(2, tmp_path_factory.mktemp("page"))


def background(page: Page) -> Any:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def silent(watched: WatchedPage, file: Path) -> bool:
    return watched.complaints == [] and set(watched.requests) == {file.as_uri()}


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_all_is_drawn_and_readable(browser: Browser, devices: int, tmp_path: Path) -> None:
    file = page_of(devices, tmp_path)
    with open_page(browser) as watched:
        page = watched.page
        for width, theme in itertools.product((1280, 480), THEMES):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=theme)
            page.goto(file.as_uri())
            colours, *lines = page.evaluate(DRAWN, CHARTS)
            assert colours > 3
            assert min(lines) > 5
            assert max(page.evaluate(WIDTHS)) <= 0
            line, text = page.evaluate(CONTRASTS)
            assert line >= 3.0
            assert text >= 4.5
        assert silent(watched, file)


def test_it_zooms_and_names_things(browser: Browser, file: Path) -> None:
    with open_page(browser) as watched:
        page = watched.page
        page.goto(file.as_uri())
        loss, tip = page.locator("#loss"), page.locator("#tip")
        whole = loss.inner_html()
        page.locator("#lanes").hover()
        page.mouse.wheel(0, -600)
        page.wait_for_function("before => document.getElementById('loss').innerHTML !== before", arg=whole)
        zoomed = loss.inner_html()
        page.mouse.down()
        page.mouse.move(400, 100, steps=3)
        page.mouse.up()
        page.wait_for_function("before => document.getElementById('loss').innerHTML !== before", arg=zoomed)
        page.get_by_role("button", name="Whole run").click()
        assert loss.inner_html() == whole
        page.locator("#lanes").hover(position={"x": 300, "y": 12})
        assert tip.inner_text().startswith("cpu")
        page.locator("#share").hover()
        assert "cpu" in tip.inner_text()
        page.locator("h1").hover()
        assert not tip.is_visible()
        assert silent(watched, file)


def test_the_theme_button_turns_the_theme(browser: Browser, file: Path) -> None:
    with open_page(browser, theme="dark") as watched:
        page = watched.page
        page.goto(file.as_uri())
        dark = background(page)
        button = page.get_by_role("button", name="Light / dark")
        button.click()
        assert background(page) != dark
        assert page.evaluate(CONTRASTS)[0] >= 3.0
        button.click()
        assert background(page) == dark
        assert silent(watched, file)


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    timeline = Timeline(HOSTILE, dict.fromkeys(HOSTILE, "GPU-0"))
    shared = {name: (1,) * len(HOSTILE) for name in ("steps", "samples", "busy_ms", "data_ms", "wait_ms")}
    for number, name in enumerate(HOSTILE):
        timeline.note(ended(number, reason=name, **shared))
    timeline.sample(1.0, 1e9, [UNKNOWN] * len(HOSTILE))
    timeline.save(file)
    with open_page(browser) as watched:
        watched.page.goto(file.as_uri())
        keys = watched.page.locator("#devices span").all_text_contents()
        assert keys == list(HOSTILE)
        rows = watched.page.locator("#list tr", has_text="round").all_text_contents()
        assert all(any(row.endswith(name) for row in rows) for name in HOSTILE)
        assert silent(watched, file)


def test_hostile_names_are_text_in_a_notebook(browser: Browser) -> None:
    times = [RankTimes({Activity.STEP: 500.0}, 60, 6, 1000.0)] * len(HOSTILE)
    scalars = dict.fromkeys(HOSTILE, 1.0)
    history = [replace(epoch(0), scalars=scalars, eval=scalars)]
    shown = view(report=efficiency_of(times, HOSTILE), history=history, problems=HOSTILE, error=HOSTILE[0])
    with open_page(browser) as watched:
        watched.page.set_content(run_html(shown))
        assert watched.page.locator(".bad").all_text_contents() == [*HOSTILE, HOSTILE[0]]
        assert watched.page.locator("th").count() == 9 + 2 * len(HOSTILE)
        assert watched.complaints == []
