"""The line that names the devices at the start."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import torch

from flowdp.device.discovery import devices as find_devices

__all__ = ["tell_devices"]

_told: set[str] = set()


def tell_devices(devices: Iterable[torch.device]) -> None:
    """Print the devices of a run, and those of this machine, as a line on stderr: once in a process.

    Args:
        devices: One per rank.
    """
    ranks = Counter(map(str, devices))
    chosen = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in ranks.items())
    line = f"flowdp: training on {chosen} | {find_devices(probe=False)}"
    if line in _told or sys.stderr is None:
        return
    _told.add(line)
    print(line, file=sys.stderr, flush=True)
