"""The table and the picture of docs/quality.md, from the record of `bench.quality`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from bench.quality.rows import ALONE, MIXES, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Results", "figure", "read", "tables", "write_page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quality.md"
PICTURE = ROOT / "docs" / "images" / "quality.svg"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

TASKS = ("fashion", "gpt", "flights")
STUDENT = 2.776
"""Half width of a 95 % interval of the mean of five seeds, in standard errors (Student's t, 4 degrees)."""

SEEDS = 5


@dataclass(frozen=True)
class Cell:
    """A row's runs of one task on one mix: their last losses, their times, and their curves."""

    losses: Sequence[float]
    wall_ms: Sequence[float]
    curves: Sequence[Sequence[Sequence[float]]]

    @property
    def loss(self) -> float:
        """Mean loss on the test part."""
        return mean(self.losses)

    @property
    def margin(self) -> float:
        """Half width of the 95 % interval of that mean."""
        return float(STUDENT * stdev(self.losses) / len(self.losses) ** 0.5)


Results = Mapping[tuple[str, str, str], Cell]
"""(task, mix, row) -> cell, of those with all seeds."""


def read(record: Path) -> Results:
    """Read a record."""
    found: dict[tuple[str, str, str], dict[int, list[list[float]]]] = defaultdict(dict)
    for text in record.read_text().splitlines():
        line = json.loads(text)
        found[line["task"], line["mix"], line["row"]][line["seed"]] = line["curve"]
    cells = {}
    for key, runs in found.items():
        curves = [runs[seed] for seed in sorted(runs)]
        if len(curves) == SEEDS:
            cells[key] = Cell([curve[-1][2] for curve in curves], [curve[-1][0] for curve in curves], curves)
    return cells


def tables(results: Results) -> str:
    """A table for each mix of devices, in Markdown."""
    alone = {task: results[task, ALONE.mix, ALONE.name] for task in TASKS}
    said = ", ".join(
        f"{task} {cell.loss:.4f} ± {cell.margin:.4f} ({100 * cell.margin / cell.loss:.1f} %)"
        for task, cell in alone.items()
    )
    parts = [f"One device: {said}."]
    for speeds in MIXES:
        mix = ":".join(f"{speed:g}" for speed in speeds)
        parts += ["", f"**Devices {mix}**", "", "| | " + " | ".join(TASKS) + " | all | time of one device |"]
        parts.append("|---|" + "---|" * (len(TASKS) + 2))
        for settings in rows():
            cells = {task: results.get((task, mix, settings.name)) for task in TASKS}
            if all(cell is not None for cell in cells.values()):
                parts.append(_line(settings.name, alone, {t: c for t, c in cells.items() if c is not None}))
    return "\n".join(parts)


def _line(name: str, alone: Mapping[str, Cell], cells: Mapping[str, Cell]) -> str:
    said, kept, times = [], True, []
    for task, cell in cells.items():
        one = alone[task]
        is_kept = cell.loss <= one.loss + one.margin
        kept &= is_kept
        percent = f"{100 * (cell.loss / one.loss - 1):+.1f} %"
        said.append(percent if is_kept else f"**{percent}**")
        times.append(f"{mean(one.wall_ms) / mean(cell.wall_ms):.2f}")
    return f"| {name} | {' | '.join(said)} | {'yes' if kept else 'no'} | {', '.join(times)} |"


def figure(results: Results) -> Figure:
    """Loss on some of the test part over wall time, for one device and for each policy at 1:2.5."""
    from matplotlib.figure import Figure

    shown = (
        (ALONE.mix, ALONE.name, "one device", "0.45"),
        ("1:2.5", "exact, batch total", "exact, batch_size (default)", "C0"),
        ("1:2.5", "cadence, batch total", "cadence, batch_size", "C1"),
        ("1:2.5", "cadence, batch each", "cadence, per_device_batch_size", "C3"),
        ("1:2.5", "async, batch total", "async, batch_size", "C2"),
        ("1:2.5", "sync, batch total", "sync, batch_size", "C4"),
    )
    drawn = Figure(figsize=(11, 3.6), layout="constrained")
    drawn.patch.set_facecolor("white")  # also readable on a dark page
    for axes, task in zip(drawn.subplots(1, len(TASKS)), TASKS, strict=True):
        for mix, row, label, color in shown:
            cell = results[task, mix, row]
            points = min(len(curve) for curve in cell.curves) - 1  # the last one is of the whole test part
            seconds = [mean(curve[at][0] for curve in cell.curves) / 1e3 for at in range(points)]
            losses = [mean(curve[at][2] for curve in cell.curves) for at in range(points)]
            axes.plot(seconds, losses, color=color, label=label, linewidth=1.6)
            axes.plot(seconds[-1:], losses[-1:], "o", color=color, markersize=4)
        low = results[task, ALONE.mix, ALONE.name].loss
        axes.set_ylim(0.97 * low, 1.35 * low if task != "flights" else 1.06 * low)
        axes.set_title(task)
        axes.set_xlabel("seconds (virtual)")
    drawn.axes[0].set_ylabel("loss on the test part")
    drawn.axes[-1].legend(fontsize=7)
    return drawn


def write_page(results: Results) -> None:
    """Put the table into the page, and draw the picture."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{tables(results)}\n{END}{tail}")
    figure(results).savefig(PICTURE, metadata={"Date": None})
