"""JupyterLab for tests and pictures: a server with folders of its own, and a notebook in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.limits import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["jupyter_folders", "open_lab", "open_notebook", "run_all"]

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "flowdp"  # of a server that lives for one test and hears this machine alone

# No news, no look for updates: nothing but this machine is asked for anything.
QUIET = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}

# Cells that are run before that are neither refused nor run.
KERNEL = """async () => {
  const session = window.jupyterapp.shell.currentWidget.sessionContext;
  await session.ready;
  await session.session.kernel.info;
}"""


def jupyter_folders(folder: Path) -> Mapping[str, str]:
    """Variables that keep Jupyter to one folder, with the flowdp of this checkout."""
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
    names += ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    folder.mkdir(parents=True)  # IPython warns of one that is not there
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**{name: str(folder / name.lower()) for name in names}, "PYTHONPATH": path}


@contextmanager
def open_lab(notebooks: Path, own: Path) -> Iterator[str]:
    """Run a JupyterLab server, and end it with its kernels.

    Args:
        notebooks: Folder that it shows.
        own: Folder for its files.

    Yields:
        Its address.
    """
    folders = jupyter_folders(own)
    settings = Path(folders["JUPYTER_CONFIG_DIR"]) / "labconfig/default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(QUIET))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    command += [
        "--expose-app-in-browser",
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={notebooks}",
    ]
    server = subprocess.Popen(
        command, env={**os.environ, **folders}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        yield _address(server)
    finally:
        server.terminate()
        server.communicate(timeout=HANG_S)


def _address(server: subprocess.Popen[str]) -> str:
    """Address of a server, when it says it."""
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
            return found.group()
    raise RuntimeError("JupyterLab ended: " + "".join(said))


def open_notebook(page: Page, address: str, name: str) -> None:
    """Open a notebook alone on a page, and wait for its kernel."""
    page.goto(f"{address}doc/tree/{name}?token={TOKEN}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.evaluate(KERNEL)


def run_all(page: Page) -> None:
    """Run the notebook's cells; returns at once."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
