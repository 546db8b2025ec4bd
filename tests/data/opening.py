"""Sources opened by keywords: options of reading and of the plan in one call."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flowdp.data.loader_source import ReadPlan
from flowdp.data.open_source import open_evaluation, open_source
from flowdp.data.source import Source
from flowdp.options import ReadingOptions

__all__ = ["evaluated", "opened"]

READING = {field.name for field in fields(ReadingOptions)}


def _split(options: dict[str, Any]) -> tuple[ReadingOptions, ReadPlan]:
    reading = ReadingOptions(**{name: options.pop(name) for name in READING & options.keys()})
    given = {name: value for name, value in options.items() if value is not None}
    return reading, ReadPlan(**{"epochs": None, **given})


def opened(dataset: object, batch_size: int | None = None, seed: int = 0, **options: Any) -> Source:
    """The source of a dataset; options of `ReadingOptions` and of `ReadPlan`."""
    return open_source(dataset, batch_size, *_split(options), seed=seed)


def evaluated(dataset: object, batch_size: int, **options: Any) -> Source:
    """The source of an evaluation; options of `ReadingOptions` and of `ReadPlan`."""
    return open_evaluation(dataset, batch_size, *_split(options))
