"""Runs examples/notebook.ipynb and keeps its outputs in it.

    python -m docs.notebook

So a reader sees them without a kernel, in the file and on the site. A widget lives only beside a kernel
and is left out; the notebook has a picture of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.limits import HANG_S

__all__ = ["NOTEBOOK", "executed", "forms", "kept"]

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/notebook.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"


def executed() -> Any:
    """The notebook with the outputs of a run in this moment."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=HANG_S, resources={"metadata": {"path": folder}}).execute()
    return notebook


def kept(notebook: Any) -> Any:
    """The notebook without widgets, and without what changes with each kernel."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def forms(notebook: Any) -> list[list[tuple[str, ...]]]:
    """The forms of the outputs of each cell of code: the kind, and the types of its data."""
    return [
        [(output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs]
        for cell in notebook.cells
        if "outputs" in cell
    ]


if __name__ == "__main__":
    nbformat.write(kept(executed()), NOTEBOOK)
