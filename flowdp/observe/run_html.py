"""A run as HTML: progress, loss curve, throughput, share and waits of each device; light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from flowdp.observe.tables import device_table, epoch_table
from flowdp.policy.efficiency import EfficiencyReport
from flowdp.policy.formats import format_duration, format_metric
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import RoundEnded

__all__ = ["RunView", "run_html"]

EPOCHS = 8
"""Newest epochs in the table."""

POINTS = 400
"""Points of the loss curve."""

STYLE = """<style>
.flowdp { font: 13px/1.5 system-ui, sans-serif; max-width: 760px; }
.flowdp b { font-weight: 600; }
.flowdp .rail { height: 6px; border-radius: 3px; background: #8884; overflow: hidden; margin: 4px 0 8px; }
.flowdp .rail i { display: block; height: 100%; background: #0072b2; }
.flowdp table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 6px 0; }
.flowdp td, .flowdp th { padding: 1px 14px 1px 0; text-align: right; font-weight: 400; border: 0; }
.flowdp tr, .flowdp td, .flowdp th { background: none; } .flowdp th { opacity: .65; }
.flowdp td:first-child, .flowdp th:first-child, .flowdp .devices :is(td, th):last-child { text-align: left; }
.flowdp .share { display: inline-block; height: 9px; border-radius: 2px; background: #0072b2; }
.flowdp .bad { color: #d55e00; }
</style>"""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Numbers of a run at one moment.

    Attributes:
        phase: As in `Status`.
        global_step: Steps of all ranks.
        total_steps: Steps of the whole run; None where not known.
        history: Records of the epochs.
        rounds: Records of the rounds that are kept.
        report: Use of the devices' time.
        problems: Problems that did not end the run.
        error: The failure, in words; "" without one.
    """

    phase: str
    global_step: int
    total_steps: int | None
    history: Sequence[EpochMetrics]
    rounds: Sequence[RoundEnded]
    report: EfficiencyReport
    problems: Sequence[str] = ()
    error: str = ""


def run_html(view: RunView) -> str:
    """The run as a fragment of a page; all text in it is escaped."""
    parts = (_head(view), _curve(view), _devices(view.report), _epochs(view.history), _problems(view))
    return f'{STYLE}<div class="flowdp">{"".join(parts)}</div>'


def _head(view: RunView) -> str:
    epoch = len(view.history) + (view.phase in ("running", "paused"))
    known = view.history[-1].epochs if view.history else None
    words = [f"<b>{escape(view.phase)}</b>", f"epoch {epoch}" + (f"/{known}" if known else "")]
    words.append(f"step {view.global_step:,}" + (f"/{view.total_steps:,}" if view.total_steps else ""))
    words.append(f"{view.report.reached:,.0f} samples/s")
    words.append(f"{100 * view.report.efficiency:.0f} % of the speed in their steps")
    words.append(format_duration(view.report.wall_ms))
    done = 0.0 if not view.total_steps else min(1.0, view.global_step / view.total_steps)
    rail = f'<div class="rail"><i style="width:{100 * done:.1f}%"></i></div>' if view.total_steps else ""
    return f"<div>{' · '.join(words)}</div>{rail}"


def _curve(view: RunView) -> str:
    losses = [(record.global_step, record.loss) for record in view.rounds if record.loss is not None]
    points = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    points = points[:: max(1, len(points) // POINTS)]
    if len(points) < 2:
        return ""
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    first, last = points[0][0], points[-1][0]
    width, height = 700, 120
    path = " ".join(
        f"{(step - first) / max(1, last - first) * width:.1f},"
        f"{4 + (high - loss) / ((high - low) or 1.0) * (height - 8):.1f}"
        for step, loss in points
    )
    return (
        f'<svg viewBox="-56 0 {width + 60} {height + 16}" width="100%" role="img" aria-label="loss">'
        f'<polyline points="{path}" fill="none" stroke="#0072b2" stroke-width="1.8"/>'
        f'<g fill="currentColor" opacity=".65" font-size="11">'
        f'<text x="-6" y="12" text-anchor="end">{format_metric(high)}</text>'
        f'<text x="-6" y="{height}" text-anchor="end">{format_metric(low)}</text>'
        f'<text x="0" y="{height + 13}">loss, step {first:,}</text>'
        f'<text x="{width}" y="{height + 13}" text-anchor="end">{last:,}</text></g></svg>'
    )


def _devices(report: EfficiencyReport) -> str:
    bars = [
        f'<span class="share" style="width:{110 * device.reached / (report.reached or 1.0):.0f}px"></span> '
        for device in report.devices
    ]
    return f'<div class="devices">{device_table(report).html({2: bars})}</div>'


def _epochs(history: Sequence[EpochMetrics]) -> str:
    table = epoch_table(history, EPOCHS)
    return table.html() if table.rows else ""


def _problems(view: RunView) -> str:
    lines = [*view.problems, *([view.error] if view.error else [])]
    return "".join(f'<div class="bad">{escape(line)}</div>' for line in lines)
