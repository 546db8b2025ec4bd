"""Tables of a run as rows of text: its epochs and its devices; for pages and terminals."""

from __future__ import annotations

from collections.abc import Sequence

from flowdp.policy.efficiency import DeviceEfficiency, EfficiencyReport
from flowdp.policy.formats import Table, format_duration, format_metric
from flowdp.policy.tally import EpochMetrics

__all__ = ["device_table", "epoch_table"]

LOSSES = 2
"""Parts of a device's time that are named."""


def epoch_table(history: Sequence[EpochMetrics], newest: int) -> Table:
    """The newest epochs with their losses, scalars and evaluations.

    Args:
        history: Records of the epochs.
        newest: Most rows.
    """
    shown = history[-newest:]
    numbers = [
        {**epoch.scalars, **{f"eval {name}": value for name, value in epoch.eval.items()}} for epoch in shown
    ]
    names = tuple(dict.fromkeys(name for row in numbers for name in row))
    rows = tuple(
        (
            str(epoch.epoch + 1),
            "" if epoch.loss is None else format_metric(epoch.loss),
            *(format_metric(row[name]) if name in row else "" for name in names),
            f"{sum(epoch.throughput):,.0f}",
            format_duration(epoch.epoch_ms),
        )
        for epoch, row in zip(shown, numbers, strict=True)
    )
    return Table(("epoch", "loss", *names, "samples/s", "time"), rows)


def device_table(report: EfficiencyReport) -> Table:
    """Throughput and share of each device, the part of its time that it trained, and the rest."""
    whole = sum(device.reached for device in report.devices) or 1.0
    rows = tuple(
        (
            device.device,
            f"{device.reached:,.0f}",
            f"{100 * device.reached / whole:.0f} %",
            f"{100 * device.parts['training']:.0f} %",
            _losses(device),
        )
        for device in report.devices
    )
    return Table(("device", "samples/s", "share", "training", "else"), rows, texts=(0, 4))


def _losses(device: DeviceEfficiency) -> str:
    """The largest parts of its time in which a device did not train."""
    others = [(cost, part) for part, cost in device.parts.items() if part != "training" and cost >= 0.01]
    largest = sorted(others, reverse=True)[:LOSSES]
    return ", ".join(f"{part} {100 * cost:.0f} %" for cost, part in largest)
