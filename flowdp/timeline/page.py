"""The timeline as one self-contained page: no network, light and dark.

Everything that a user may have named is data in it, as JSON without "<", and is set as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from flowdp.policy.efficiency import PARTS, Activity, DeviceEfficiency, EfficiencyReport
from flowdp.timeline.figure import COLOURS
from flowdp.timeline.record import TimelineRecord
from flowdp.timeline.rows import Matrix, thinned
from flowdp.timeline.spans import ORDER, merged

__all__ = ["page_of"]

SPANS = 3000
"""Spans of one activity of a rank on the page."""

EVENTS = 500
"""Newest events of each kind on the page."""

INTERPRETER = "#8a8a00"
"""Colour of the one part of the report that is no activity."""


def page_of(timeline: TimelineRecord) -> str:
    """The timeline as HTML text."""
    page = files("flowdp.timeline").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(_data(timeline), allow_nan=False, separators=(",", ":"))
    return page.replace("__DATA__", text.replace("<", r"\u003c"))


def _data(timeline: TimelineRecord) -> dict[str, Any]:
    report = timeline.report()
    used = [activity for activity in ORDER if any(len(one.read(activity)) for one in timeline.ranks)]
    return {
        "headline": "no steps yet" if report is None else report.headline,
        "wall_ms": timeline.wall_ms,
        "devices": timeline.devices,
        "activities": [
            {"name": one.value, "colour": COLOURS[one], "beside": one is Activity.TRANSFER} for one in used
        ],
        "lanes": [[_spans(timeline.table(rank, one)) for one in used] for rank in timeline.ranks],
        "rounds": _rounds(timeline),
        "machine": _machine(timeline),
        "events": _events(timeline),
        "report": None if report is None else _report(report),
    }


def _spans(table: Matrix) -> list[float]:
    return [round(number, 3) for number in thinned(table, SPANS, merged).reshape(-1).tolist()]


def _rounds(timeline: TimelineRecord) -> dict[str, Any]:
    rounds, ranks = timeline.rounds, range(len(timeline.devices))
    return {
        "at": [round(one.at_ms, 3) for one in rounds],
        "loss": _numbers([one.loss for one in rounds]),
        "anchor": [one.anchor for one in rounds],
        "rates": [
            _numbers([1e3 * one.samples[rank] / one.wall_ms if one.wall_ms else math.nan for one in rounds])
            for rank in ranks
        ],
        "shares": [
            _numbers([one.samples[rank] / max(1, sum(one.samples)) for one in rounds]) for rank in ranks
        ],
    }


def _machine(timeline: TimelineRecord) -> dict[str, Any]:
    samples, cards = timeline.samples, range(len(timeline.gpus))
    return {
        "at": [round(one.at_ms, 3) for one in samples],
        "users": ["cores", *timeline.gpus],
        "use": [
            _numbers([one.cpu for one in samples]),
            *(_numbers([one.gpus[card].utilisation for one in samples]) for card in cards),
        ],
        "stores": ["RAM of this process", *timeline.gpus],
        "memory": [
            _numbers([one.ram_bytes / 2**30 for one in samples]),
            *(_numbers([one.gpus[card].memory_bytes / 2**30 for one in samples]) for card in cards),
        ],
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Numbers for JSON, with six digits; None for one that is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _events(timeline: TimelineRecord) -> list[dict[str, Any]]:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in timeline.events:
        shown = {"at": round(event.at_ms, 3), "kind": event.kind, "text": event.text, "rank": event.rank}
        by_kind.setdefault(event.kind, []).append(shown)
    newest = [event for events in by_kind.values() for event in events[-EVENTS:]]
    return sorted(newest, key=lambda event: event["at"])


def _report(report: EfficiencyReport) -> dict[str, Any]:
    colours = [COLOURS[activities[0]] if activities else INTERPRETER for activities in PARTS.values()]
    columns: list[tuple[str, EfficiencyReport | DeviceEfficiency]] = [("all", report)]
    columns += [(one.device, one) for one in report.devices]
    return {
        "parts": list(PARTS),
        "colours": colours,
        "columns": [
            {"name": name, "ideal": one.ideal, "reached": one.reached, "parts": list(one.parts.values())}
            for name, one in columns
        ],
    }
