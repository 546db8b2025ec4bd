"""Whether captured steps pay: found by the times of eager ones."""

from __future__ import annotations

from statistics import median

__all__ = ["FUTILE", "PAYS", "WARM_UP", "LaunchWatch"]

WARM_UP = 2
"""Eager steps of a form before it is recorded: they allocate memory at first use."""

PAYS = 100
"""Steps that a graph must have run for its recording to have been worth it."""

FUTILE = 8
"""Graphs that ran fewer steps than that and became void, after which no other is recorded."""

WATCHED = 50
"""Steps that are watched before it is decided whether a run's are captured."""

SETTLED = 10
"""The first of these do not count: they load kernels and allocate."""

BESIDE = 1.1
"""A device that ends a step at most this much later than the host has launched it had been waiting for it."""


class LaunchWatch:
    """Tells whether the host is behind its device: whether a step's launches take longer than its kernels.

    A device that waits for launches ends a step as soon as the last one has come, so it takes as long as the
    host. One with enough to do takes longer.

    Attributes:
        is_behind: Whether the host is, in most steps; None: too few have been seen.
        launch_ms: Median time of the host for a step, once that is known.
        device_ms: Median time of the device for a step, likewise.
    """

    def __init__(self) -> None:
        self.is_behind: bool | None = None
        self.launch_ms = self.device_ms = 0.0
        self._seen: list[tuple[float, float]] = []

    def take(self, launch_ms: float, device_ms: float) -> None:
        """Take the times of an eager step, on the host and on the device."""
        if self.is_behind is not None:
            return
        self._seen.append((launch_ms, device_ms))
        if len(self._seen) < WATCHED:
            return
        seen = self._seen[SETTLED:]
        self.is_behind = 2 * sum(device <= BESIDE * launch for launch, device in seen) > len(seen)
        self.launch_ms, self.device_ms = (median(times) for times in zip(*seen, strict=True))
        self._seen.clear()
