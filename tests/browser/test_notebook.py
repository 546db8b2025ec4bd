"""Notebooks: the example from end to end, and a run that is watched and stopped in JupyterLab."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import open_page
from tests.browser.jupyter import jupyter_folders, open_lab, open_notebook, run_all

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/notebook.ipynb"

WATCHED = [
    """
import torch
import flowdp

torch.set_num_threads(1)
inputs = torch.randn(4096, 8)
run = flowdp.Trainer(
    torch.nn.Linear(8, 1),
    lambda params: torch.optim.SGD(params, lr=1e-3),
    torch.nn.MSELoss(),
    dataset=(inputs, inputs.sum(1, keepdim=True)),
    batch_size=4,
    epochs=1_000_000,
    devices=["cpu"] * 2,
    progress=False,
).start()
run""",
    "run.dashboard()",
    "print('meanwhile', run.status().phase)",
]


def write_notebook(path: Path, cells: list[str]) -> None:
    from nbformat import v4, write

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    write(v4.new_notebook(cells=[*map(v4.new_code_cell, cells)], metadata={"kernelspec": kernel}), path)


def needs(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install 'flowdp[browser]'")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in jupyter_folders(tmp_path / "jupyter").items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("folders")
def test_the_example_runs(tmp_path: Path) -> None:
    needs("nbclient", "ipykernel", "ipywidgets", "matplotlib", "sklearn")
    import nbformat

    from docs.notebook import executed, forms, kept

    notebook = executed()
    outputs = [cell.outputs for cell in notebook.cells if cell.get("outputs")]
    shown, dashboard, meanwhile, end, report, plot = outputs
    assert "<b>done</b>" in shown[0].data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in dashboard[0].data
    assert "running" in meanwhile[0].text
    accuracy = re.search(r"test accuracy (\d+)", end[0].text)
    assert accuracy is not None
    assert int(accuracy[1]) > 80  # 92 as a rule
    assert "waiting for others" in report[0].data["text/html"]
    assert "image/png" in plot[0].data
    widgets = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    assert any("<b>done</b>" in str(widget.state.get("value")) for widget in widgets)
    assert forms(kept(notebook)) == forms(nbformat.read(EXAMPLE, as_version=4))  # python -m docs.notebook


def test_a_run_is_watched_and_stopped_in_jupyterlab(browser: Browser, tmp_path: Path) -> None:
    needs("jupyterlab", "ipykernel", "ipywidgets")
    notebooks, picture = tmp_path / "notebooks", tmp_path / "training.png"
    notebooks.mkdir()
    write_notebook(notebooks / "run.ipynb", WATCHED)
    with open_lab(notebooks, tmp_path / "own") as address, open_page(browser) as watched:
        page = watched.page
        open_notebook(page, address, "run.ipynb")
        run_all(page)
        page.get_by_text("meanwhile running").wait_for()  # the cells before it have returned
        cell, dashboard = (
            page.locator(".flowdp:not(.jupyter-widgets *)"),
            page.locator(".jupyter-widgets .flowdp"),
        )
        for shown in (cell, dashboard):
            shown.locator("polyline").wait_for()
            step = shown.inner_text()
            page.wait_for_function(
                "([one, before]) => one.innerText !== before", arg=[shown.element_handle(), step]
            )
        picture.write_bytes(page.screenshot())  # with a path, playwright would leave a thread
        rate = page.locator(".jupyter-widgets input[type=number]")
        assert rate.input_value() == "0.001"
        stop = page.locator(".jupyter-button", has_text="Stop")
        stop.click()
        for shown in (cell, dashboard):
            shown.get_by_text("stopped", exact=True).wait_for()
        page.locator(".jupyter-button:disabled", has_text="Stop").wait_for()  # it hears of the end by itself
        assert all(request.startswith((address, "data:", "blob:")) for request in watched.requests)
