"""Tables of a run as rows of text: its epochs and its devices; for pages and terminals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO

from flowdp.policy.efficiency import DeviceEfficiency, EfficiencyReport
from flowdp.policy.formats import format_duration, format_metric
from flowdp.policy.table import Table
from flowdp.policy.tally import EpochMetrics

__all__ = ["device_table", "epoch_table", "print_tables"]

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
        {**one.scalars, **{f"eval {name}": value for name, value in one.eval.items()}} for one in shown
    ]
    names = tuple(dict.fromkeys(name for own in numbers for name in own))
    rows = tuple(
        (
            str(one.epoch + 1),
            "" if one.loss is None else format_metric(one.loss),
            *(format_metric(own[name]) if name in own else "" for name in names),
            f"{sum(one.throughput):,.0f}",
            format_duration(one.epoch_ms),
        )
        for one, own in zip(shown, numbers, strict=True)
    )
    return Table(("epoch", "loss", *names, "samples/s", "time"), rows)


def device_table(report: EfficiencyReport) -> Table:
    """Throughput and share of each device, the part of its time that it trained, and the rest."""
    whole = sum(one.reached for one in report.devices) or 1.0
    rows = tuple(
        (
            one.device,
            f"{one.reached:,.0f}",
            f"{100 * one.reached / whole:.0f} %",
            f"{100 * one.parts['training']:.0f} %",
            _losses(one),
        )
        for one in report.devices
    )
    return Table(("device", "samples/s", "share", "training", "else"), rows, texts=(0, 4))


def _losses(device: DeviceEfficiency) -> str:
    """The largest parts of its time in which a device did not train."""
    others = [(cost, part) for part, cost in device.parts.items() if part != "training" and cost >= 0.01]
    largest = sorted(others, reverse=True)[:LOSSES]
    return ", ".join(f"{part} {100 * cost:.0f} %" for cost, part in largest)


def print_tables(tables: Sequence[Table], headline: str, file: IO[str]) -> None:
    """Print tables and a line; on a terminal by rich, where that is installed.

    Args:
        tables: Tables; those without rows are left out.
        headline: The line.
        file: Terminal to print to.
    """
    filled = [table for table in tables if table.rows]
    if find_spec("rich") is None or not file.isatty():
        print("\n\n".join([*map(str, filled), headline]), file=file)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    console = Console(file=file, width=_width(file))
    for table in filled:
        drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for at, head in enumerate(table.header):
            drawn.add_column(Text(head), justify="left" if at in table.texts else "right", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*map(Text, row))  # as text: a name may look like markup
        console.print(drawn)
    console.print(Text(headline))


def _width(file: IO[str]) -> int | None:
    """Columns of a terminal; None of something else. rich asks the process's own stdin."""
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        return None
