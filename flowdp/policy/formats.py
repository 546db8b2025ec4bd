"""Numbers as short text, for records and progress lines."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_duration", "format_indices", "format_metric"]


def format_duration(ms: float) -> str:
    """A duration in the two units that matter: "420ms", "1.2s", "4m 32s", "3h 12m"."""
    # Each limit is where the unit below would round up to a whole one of the unit above.
    if ms < 999.5:
        return f"{ms:.0f}ms"
    if ms < 59_950.0:
        return f"{ms / 1000.0:.1f}s"
    seconds = int(ms / 1000.0 + 0.5)
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"


def format_metric(value: float) -> str:
    """A metric: "0", scientific below 0.001, four decimals below 100, else two."""
    if value == 0.0:
        return "0"
    if abs(value) < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4f}" if abs(value) < 100.0 else f"{value:.2f}"


def format_indices(indices: Sequence[int]) -> str:
    """The first eight of some indices, and whether there are more: "3, 7, 1, ..."."""
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
