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
from flowdp.timeline.spans import ORDER, Matrix, merged, thinned

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
    used = [activity for activity in ORDER if any(len(rank.read(activity)) for rank in timeline.ranks)]
    return {
        "about": timeline.about,
        "headline": "no steps yet" if report is None else report.headline,
        "wall_ms": timeline.wall_ms,
        "devices": timeline.devices,
        "activities": [
            {"name": activity.value, "colour": COLOURS[activity], "beside": activity is Activity.TRANSFER}
            for activity in used
        ],
        "lanes": [[_spans(timeline.table(rank, activity)) for activity in used] for rank in timeline.ranks],
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
        "at": [round(record.at_ms, 3) for record in rounds],
        "loss": _numbers([record.loss for record in rounds]),
        "anchor": [record.anchor for record in rounds],
        "rates": [_numbers([record.rate(rank) for record in rounds]) for rank in ranks],
        "shares": [
            _numbers([record.samples[rank] / max(1, sum(record.samples)) for record in rounds])
            for rank in ranks
        ],
    }


def _machine(timeline: TimelineRecord) -> dict[str, Any]:
    samples, cards = timeline.samples, range(len(timeline.gpus))
    return {
        "at": [round(sample.at_ms, 3) for sample in samples],
        "users": ["cores", *timeline.gpus],
        "use": [
            _numbers([sample.cpu for sample in samples]),
            *(_numbers([sample.gpus[card].utilisation for sample in samples]) for card in cards),
        ],
        "stores": ["RAM of this process", *timeline.gpus],
        "memory": [
            _numbers([sample.ram_bytes / 2**30 for sample in samples]),
            *(_numbers([sample.gpus[card].memory_bytes / 2**30 for sample in samples]) for card in cards),
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
    names = list(report.parts)
    colours = [COLOURS[PARTS[name][0]] if PARTS[name] else INTERPRETER for name in names]
    columns: list[tuple[str, EfficiencyReport | DeviceEfficiency]] = [("all", report)]
    columns += [(device.device, device) for device in report.devices]
    return {
        "parts": names,
        "notes": report.notes,
        "colours": colours,
        "columns": [
            {"name": name, "ideal": part.ideal, "reached": part.reached, "parts": list(part.parts.values())}
            for name, part in columns
        ],
    }
