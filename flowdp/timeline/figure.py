"""The timeline as a figure of matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from flowdp.policy.efficiency import Activity
from flowdp.timeline.record import TimelineRecord
from flowdp.timeline.spans import ORDER, taken
from flowdp.validators import check_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "figure_of"]

COLOURS = {
    Activity.STEP: "#0072b2",
    Activity.DATA: "#e69f00",
    Activity.GATE: "#d55e00",
    Activity.LEFT_OUT: "#f2b8a0",
    Activity.ROUNDING: "#e8914f",
    Activity.GUARD: "#7f3b00",
    Activity.AVERAGE: "#009e73",
    Activity.EVALUATE: "#cc79a7",
    Activity.SAVE: "#56b4e9",
    Activity.HEAL: "#f0e442",
    Activity.IDLE: "#b8b8b8",
    Activity.TRANSFER: "#7a6fb0",
    Activity.FORWARD: "#4a9bd4",
    Activity.BACKWARD: "#004a75",
    Activity.SUM: "#2fb58a",
    Activity.OWN: "#dddddd",
}
"""Colours of the activities: those of Okabe and Ito, which colour-blind readers tell apart, and more."""

COLUMNS, ROWS = 800, 40
"""Cells of a lane: each one is at least a pixel."""


def figure_of(timeline: TimelineRecord) -> Figure:
    """Draw lanes, loss and throughput.

    Raises:
        OptionError: matplotlib is not installed.
    """
    check_installed("a plot", "matplotlib", "plot")
    from matplotlib.figure import Figure

    ranks = len(timeline.devices)
    figure = Figure(figsize=(10.0, 4.4 + 0.4 * ranks), layout="constrained")
    lanes, loss, rate = figure.subplots(3, 1, sharex=True, height_ratios=(0.6 + 0.4 * ranks, 1.6, 1.6))
    _draw_lanes(lanes, timeline)
    figure.suptitle(_literal(timeline.about), fontsize="medium")
    rounds = timeline.rounds
    at_s = [record.at_ms / 1e3 for record in rounds]
    loss.plot(at_s, [record.loss for record in rounds])
    loss.set_ylabel("loss")
    loss.set_visible(not all(math.isnan(record.loss) for record in rounds))  # `setup` knows none
    for rank, device in enumerate(timeline.devices):
        rate.plot(at_s, [record.rate(rank) for record in rounds], label=_literal(device))
    rate.set_ylabel("samples/s")
    rate.set_ylim(bottom=0.0)
    rate.set_xlabel("seconds")
    if rounds:
        rate.legend(ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return figure


def _draw_lanes(axes: Axes, timeline: TimelineRecord) -> None:
    """Draw a lane for each device, an image: a span may be shorter than a pixel, or be several merged ones.

    So each column has the colours of its stretch of time, stacked by the fractions of it that they take; less
    than a cell is owed to the next columns.
    """
    from matplotlib.colors import to_rgba_array
    from matplotlib.patches import Patch

    edges = np.linspace(0.0, max(timeline.wall_ms, 1.0), COLUMNS + 1)
    rows = np.arange(ROWS)[:, None]
    found: set[Activity] = set()
    for rank, recorder in enumerate(timeline.ranks):
        tables = {activity: timeline.table(recorder, activity) for activity in ORDER}
        used = [one for one, spans in tables.items() if len(spans) and one is not Activity.TRANSFER]
        palette = to_rgba_array([*(COLOURS[activity] for activity in used), "none"])
        places, tops = np.zeros((ROWS, COLUMNS), int), np.zeros(COLUMNS)
        for activity in used:
            tops += np.diff(np.rint(ROWS * taken(tables[activity], edges).cumsum()), prepend=0.0)
            places += rows >= tops
        extent = (0.0, edges[-1] / 1e3, rank + 0.4, rank - 0.4)
        axes.imshow(palette[places], extent=extent, origin="lower", aspect="auto", interpolation="nearest")
        found.update(used)
    axes.set_yticks(range(len(timeline.devices)), [_literal(device) for device in timeline.devices])
    axes.set(xlim=(0.0, edges[-1] / 1e3), ylim=(len(timeline.devices) - 0.5, -0.5))
    if found:
        key = [Patch(color=COLOURS[one], label=one.value) for one in ORDER if one in found]
        axes.legend(handles=key, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _literal(name: str) -> str:
    return name.replace("$", r"\$")  # which would begin a formula
