"""The timeline as a figure of matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowdp.policy.efficiency import Activity
from flowdp.timeline.record import TimelineRecord
from flowdp.timeline.spans import ORDER
from flowdp.validators import check_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "figure_of"]

COLOURS = {
    Activity.STEP: "#0072b2",
    Activity.DATA: "#e69f00",
    Activity.GATE: "#d55e00",
    Activity.AVERAGE: "#009e73",
    Activity.EVALUATE: "#cc79a7",
    Activity.SAVE: "#56b4e9",
    Activity.HEAL: "#f0e442",
    Activity.IDLE: "#b8b8b8",
    Activity.TRANSFER: "#7a6fb0",
}
"""Colours of the activities: those of Okabe and Ito, which colour-blind readers tell apart, and two more."""


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
    rounds = timeline.rounds
    at_s = [record.at_ms / 1e3 for record in rounds]
    loss.plot(at_s, [record.loss for record in rounds])
    loss.set_ylabel("loss")
    for rank, device in enumerate(timeline.devices):
        rate.plot(at_s, [record.rate(rank) for record in rounds], label=_literal(device))
    rate.set_ylabel("samples/s")
    rate.set_xlabel("seconds")
    if rounds:
        rate.legend(loc="lower right", frameon=False)
    return figure


def _draw_lanes(axes: Axes, timeline: TimelineRecord) -> None:
    for rank, recorder in enumerate(timeline.ranks):
        for activity in ORDER:
            spans = timeline.table(recorder, activity)
            if len(spans) and activity is not Activity.TRANSFER:
                bars = [(start / 1e3, (end - start) / 1e3) for start, end, _, _ in spans.tolist()]
                axes.broken_barh(bars, (rank - 0.4, 0.8), color=COLOURS[activity], label=activity.value)
    axes.set_yticks(range(len(timeline.devices)), [_literal(device) for device in timeline.devices])
    axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    if shown:
        axes.legend(
            shown.values(), shown.keys(), ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False
        )


def _literal(name: str) -> str:
    return name.replace("$", r"\$")  # which would begin a formula
