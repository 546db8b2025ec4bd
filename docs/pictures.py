"""Pictures of the README and the documentation, from real runs, into docs/images: `make pictures`.

Needs Chromium, tmux and the extra `browser`. Two CPU devices, one of them slower, learn handwritten
digits; the notebook is examples/notebook.ipynb.

Each picture carries a stamp: a digest of what its kind of output shows of one fixed run. `outdated` names the
pictures with another stamp than that of the code; a contract test calls it.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flowdp
from flowdp.observe import bar, notebook
from flowdp.observe.run_html import run_html
from flowdp.observe.tables import device_table, epoch_table
from flowdp.policy.efficiency import Activity
from flowdp.timeline.figure import COLOURS
from flowdp.timeline.record import TimelineRecord
from tests.browser.chromium import chromium_program, open_browser, open_page
from tests.browser.jupyter import open_lab, open_notebook, run_all
from tests.browser.terminal import open_terminal
from tests.observe.test_run_html import view
from tests.timeline.test_timeline import ended

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).resolve().parent / "images"
NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/notebook.ipynb"
LIMIT_BYTES = 150_000
COLUMNS = 100
WAIT_S = 10e-3

THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")

SHELL = """<body style="margin: 0"><pre style="margin: 0; padding: 16px 20px; display: inline-block;
background: #14171b; color: #e8eaed; font: 14px/1.35 'DejaVu Sans Mono', monospace">{}</pre></body>"""

STAMP = "flowdp"
"""Key of the stamp among a picture's texts."""

SCRIPT = "from docs.pictures import train\n\ntrain(timeline=False, progress=True)\n"


def train(timeline: Path | bool, progress: bool) -> flowdp.Run:
    """Train to the end on two devices, the second of which waits in each of its steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if flowdp.current_worker().rank == 1:
            time.sleep(WAIT_S)
        return F.cross_entropy(model(batch[0]), batch[1])

    run = flowdp.Trainer(
        nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
        ),
        lambda params: torch.optim.Adam(params, lr=2e-3),
        loss,
        dataset=(images[:1500], labels[:1500]),
        evaluation=(images[1500:], labels[1500:]),
        per_device_batch_size=32,
        policy="cadence",  # so that the length of rounds is seen
        epochs=24,
        devices=["cpu", "cpu"],
        timeline=timeline,
        progress=progress,
    ).start()
    run.join()
    return run


def page(browser: Browser, folder: Path) -> None:
    """The page of a run, light and dark: devices, curves and efficiency."""
    file = folder / "run.html"
    train(timeline=file, progress=False)
    for theme in THEMES:
        with open_page(browser, 1120, 1000, theme) as watched:
            watched.page.goto(file.as_uri())
            end = watched.page.locator("#efficiency").bounding_box()
            assert end is not None
            height = end["y"] + end["height"] + 12
            watched.page.set_viewport_size({"width": 1120, "height": round(height)})
            write(f"page-{theme}.png", watched.page.screenshot())


def dashboard(browser: Browser, folder: Path) -> None:
    """The dashboard in JupyterLab, while the run trains."""
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    shutil.copy(NOTEBOOK, notebooks)
    with open_lab(notebooks, folder / "jupyter") as address, open_page(browser, 1000, 1300) as watched:
        open_notebook(watched.page, address, NOTEBOOK.name)
        run_all(watched.page)
        shown = watched.page.locator(".jupyter-widgets .flowdp")
        shown.get_by_text(re.compile(r"epoch ([6-9]|1.)/20")).first.wait_for()
        write("dashboard.png", watched.page.locator(".jp-Cell", has=shown).screenshot())


def terminal(browser: Browser, folder: Path) -> None:
    """The terminal: the bar, and the tables at its end."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with open_terminal(script, COLUMNS) as shell:
        shell.wait_for_end()
        screen = shell.screen().rstrip()
    if "of the speed in their steps" not in screen:
        raise RuntimeError(screen)
    with open_page(browser) as watched:
        watched.page.set_content(SHELL.format(escape(screen)))
        write("terminal.png", watched.page.locator("pre").screenshot())


def outputs() -> dict[str, tuple[object, ...]]:
    """What each picture's kind of output shows of one fixed run, and its styles, by the picture's name."""
    seen, timeline = view(), TimelineRecord(["a", "b"], about="a model")
    timeline.note(ended(0, anchor=3, share=(0.75, 0.25)))
    template = Path(flowdp.__file__).parent / "timeline/page.html"
    events = [(event.kind, event.text) for event in timeline.events]
    page = template.read_text(encoding="utf-8"), COLOURS, list(Activity), str(seen.report), events
    tables = epoch_table(seen.history, bar.EPOCHS), device_table(seen.report), seen.report.headline
    return {
        **{f"page-{theme}.png": page for theme in THEMES},
        "dashboard.png": (run_html(seen), Path(notebook.__file__).read_text(encoding="utf-8")),
        "terminal.png": (*map(str, tables), bar.FORMAT),
    }


def stamp(output: tuple[object, ...]) -> str:
    """The digest of an output."""
    return hashlib.sha256(repr(output).encode()).hexdigest()[:16]


def outdated(folder: Path = IMAGES) -> list[str]:
    """Names of the pictures that show another output than the code has now, or are missing."""
    from PIL import Image

    def stamp_of(file: Path) -> object:
        with Image.open(file) as picture:
            return picture.info.get(STAMP)

    found = []
    for name, output in outputs().items():
        file = folder / name
        if not file.is_file() or stamp_of(file) != stamp(output):
            found.append(name)
    return found


def write(name: str, screenshot: bytes) -> None:
    """Write a picture with its stamp; a page of a repository is read over slow lines."""
    from PIL import Image, PngImagePlugin

    info, file = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text(STAMP, stamp(outputs()[name]))
    Image.open(io.BytesIO(screenshot)).save(file, "PNG", pnginfo=info, optimize=True)
    picture = file.getvalue()
    if len(picture) > LIMIT_BYTES:
        raise ValueError(f"{name} has {len(picture):,} bytes, more than {LIMIT_BYTES:,}")
    (IMAGES / name).write_bytes(picture)
    print(f"{name}: {len(picture):,} bytes")


def main() -> None:
    """Render them all."""
    program = chromium_program()
    if program is None:
        sys.exit("needs Chromium")
    IMAGES.mkdir(exist_ok=True)
    with open_browser(program) as browser:
        for render in (page, dashboard, terminal):
            with tempfile.TemporaryDirectory() as folder:
                render(browser, Path(folder))


if __name__ == "__main__":
    main()
