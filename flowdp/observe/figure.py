"""Figures of matplotlib, without pyplot: no window, no state of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowdp.validators import check_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure"]


def new_figure(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes.

    Args:
        x: Label of the horizontal axis.
        y: Label of the vertical axis.

    Raises:
        OptionError: matplotlib is not installed.

    Threads:
        Any; a figure belongs to one at a time.
    """
    check_installed("a plot", "matplotlib", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
