"""The timeline as a trace in the JSON format of chrome://tracing, which Perfetto reads.

A rank is a process there, and each activity one of its threads. Source: "Trace Event Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from flowdp.timeline.record import TimelineRecord
from flowdp.timeline.spans import ORDER

__all__ = ["trace_of"]

Event = dict[str, Any]


def trace_of(timeline: TimelineRecord) -> str:
    """The timeline as JSON text; times in microseconds since the first span began, or the run.

    Threads of ranks start before the run begins, and Perfetto drops spans with times below zero.
    """
    timed = [*_spans(timeline), *_counters(timeline), *_instants(timeline)]
    first = min((0.0, *(event["ts"] for event in timed)))
    for event in timed:
        event["ts"] = round(event["ts"] - first, 3)
    whole = {"traceEvents": [*_names(timeline), *timed], "displayTimeUnit": "ms"}
    return json.dumps(whole, allow_nan=False, ensure_ascii=False)  # Perfetto shows "\u2192" as it stands


def _names(timeline: TimelineRecord) -> Iterator[Event]:
    yield _name("process_name", 1, 0, "run")
    yield {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": -1}}
    for rank, device in enumerate(timeline.devices):
        yield _name("process_name", _process(rank), 0, device)
        for thread, activity in enumerate(ORDER, 1):
            yield _name("thread_name", _process(rank), thread, activity.value)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _process(rank: int) -> int:
    return rank + 2  # the run itself is 1, and 0 is the idle process of the system


def _spans(timeline: TimelineRecord) -> Iterator[Event]:
    for span in timeline.spans:
        yield {
            "ph": "X",
            "name": span.activity.value,
            "cat": "rank",
            "pid": _process(span.rank),
            "tid": ORDER.index(span.activity) + 1,
            "ts": round(span.start_ms * 1e3, 3),
            "dur": round((span.end_ms - span.start_ms) * 1e3, 3),
            "args": {"count": span.count, "busy_ms": round(span.busy_ms, 6)},
        }


def _counters(timeline: TimelineRecord) -> Iterator[Event]:
    for done in timeline.rounds:
        numbers = {
            "loss": done.loss,
            "learning rate": done.lr,
            "round length": done.anchor,
            "drift": done.drift,
        }
        numbers |= {f"samples/s of rank {rank}": done.rate(rank) for rank in range(len(done.samples))}
        yield from _counted(done.at_ms, numbers)
    for sample in timeline.samples:
        numbers = {"cores in use": sample.cpu, "RAM in MB": sample.ram_bytes / 1e6}
        for name, gpu in zip(timeline.gpus, sample.gpus, strict=True):
            numbers[f"{name} in use, %"] = 100 * gpu.utilisation
            numbers[f"{name} memory in MB"] = gpu.memory_bytes / 1e6
        yield from _counted(sample.at_ms, numbers)


def _counted(at_ms: float, numbers: dict[str, float]) -> Iterator[Event]:
    for name, value in numbers.items():
        if math.isfinite(value):  # the format has no other numbers
            yield {"ph": "C", "name": name, "pid": 1, "ts": round(at_ms * 1e3, 3), "args": {"value": value}}


def _instants(timeline: TimelineRecord) -> Iterator[Event]:
    for event in timeline.events:
        yield {
            "ph": "i",
            "name": event.text,
            "cat": event.kind,
            "s": "g" if event.rank is None else "p",
            "pid": 1 if event.rank is None else _process(event.rank),
            "tid": 0,
            "ts": round(event.at_ms * 1e3, 3),
        }
