"""Tests of figures: without pyplot, and an error that names the extra."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from flowdp.observe.figure import new_figure


def test_a_figure_is_drawn_without_pyplot() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure, axes = new_figure("seconds", "loss")
    axes.plot([0, 1], [2, 1])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds", "loss")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    program = """
import sys
from flowdp.observe.figure import new_figure
new_figure("x", "y")
print("matplotlib.pyplot" in sys.modules)
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert child.stdout.strip() == "False", child.stderr
