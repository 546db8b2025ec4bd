"""The cells of examples/notebook.ipynb on two replicas of a card.

They run in this process, one behind the other: jupyter need not be there. Without scikit-learn the digits are
made-up ones; a cell that needs another package that is missing is skipped and named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch

import flowdp
from bench.gpu.part import Figure, Finding, Note, Place
from bench.harness import ROOT

EXAMPLE = ROOT / "examples/notebook.ipynb"
LEAST = 0.8


def cells(place: Place) -> list[str]:
    """Code of the notebook, without its magic, and with the card twice in place of two CPU devices."""
    found = json.loads(EXAMPLE.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    texts = ["\n".join(line for line in text.splitlines() if not line.startswith("%")) for text in texts]
    return [text.replace('["cpu", "cpu"]', f'["{place.device}", "{place.device}"]') for text in texts]


def made_up_digits(**_: bool) -> tuple[Any, Any]:
    """Ten pictures of 8 x 8 with noise on them, in the form of `sklearn.datasets.load_digits`."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 10, 1797)
    pictures = draw.uniform(0, 16, (10, 64))[labels] + draw.normal(0, 3, (1797, 64))
    return pictures.clip(0, 16), labels


def lend_digits() -> None:
    """Put made-up digits in the place of scikit-learn, in this process."""
    package, datasets = ModuleType("sklearn"), ModuleType("sklearn.datasets")
    datasets.load_digits = made_up_digits  # type: ignore[attr-defined]
    package.datasets = datasets  # type: ignore[attr-defined]
    sys.modules["sklearn"], sys.modules["sklearn.datasets"] = package, datasets


def measure(place: Place) -> Iterator[Finding]:
    if find_spec("sklearn") is None:
        lend_digits()
        yield Note("notebook: scikit-learn is missing, so the digits are made up")
    names: dict[str, Any] = {}
    for number, text in enumerate(cells(place), 1):
        try:
            exec(compile(text, f"cell {number} of {EXAMPLE.name}", "exec"), names)
        except (ImportError, flowdp.FlowdpError) as fault:
            if "run" in names and names["run"].error is not None:
                raise
            yield Note(f"notebook: cell {number} skipped, {fault}")
    state, share = names["state"], float(names["accuracy"])
    yield Figure("notebook: steps", state.global_step)
    yield Figure("notebook: test accuracy, %", 100 * share)
    if not share > LEAST:
        raise RuntimeError(f"the notebook's model has {share:.1%} of the test part right")
    torch.cuda.empty_cache()
