"""Pixels of a picture by colour, for comparisons with the numbers that it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flowdp
from flowdp.policy.efficiency import PARTS
from flowdp.timeline.figure import COLOURS

__all__ = ["TOLERANCE", "differences", "fractions", "is_colour"]

Image = NDArray[np.uint8]

WAITS = ("rounding", "guard")
"""Causes of waits that the report tells apart, and lanes do not."""

TOLERANCE = 0.04
"""Part of a lane by which a colour may differ from the report: a row of a figure may be one pixel or two."""


def is_colour(image: Image, colour: str, within: int = 2) -> NDArray[np.bool_]:
    """Where a picture has a colour, "#rrggbb". Shape (height, width).

    Args:
        image: Shape (height, width, 3 or 4).
        colour: Its name.
        within: Largest difference in red, green and blue.
    """
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=int)
    return np.asarray((np.abs(image[:, :, :3].astype(int) - wanted) <= within).all(axis=2))


def fractions(image: Image, colours: Mapping[str, str]) -> dict[str, float]:
    """Parts of the pixels that have each colour, by the colours' names."""
    return {name: float(is_colour(image, colour).mean()) for name, colour in colours.items()}


def differences(lanes: list[Image], run: flowdp.Run) -> dict[tuple[int, str], tuple[float, float]]:
    """Parts of the report, and the parts of the pixels of a device's lane, where these differ from it.

    Args:
        lanes: The picture of each device's lane.
        run: The run of both.
    """
    report = run.report()
    longer = run.timeline.wall_ms / report.wall_ms  # threads begin before the run, and leave before its end
    found: dict[tuple[int, str], tuple[float, Any]] = {}
    for rank, (lane, device) in enumerate(zip(lanes, report.devices, strict=True)):
        drawn = fractions(lane, {activity.value: colour for activity, colour in COLOURS.items()})
        parts = dict(device.parts)
        for cause in WAITS:
            parts["waiting for others"] += parts.pop(cause, 0.0)
        for part in parts:
            seen = longer * sum(drawn[activity.value] for activity in PARTS[part])
            if PARTS[part] and abs(seen - parts[part]) > TOLERANCE:
                found[rank, part] = parts[part], seen
    return found
