"""The line that names the devices at the start."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from flowdp.device.discovery import devices as find_devices

__all__ = ["tell_devices"]

_told: set[str] = set()


def tell_devices(devices: Iterable[torch.device], machines: Sequence[str] = ()) -> None:
    """Print the devices of a run, and those of this machine, as a line on stderr: once in a process.

    Args:
        devices: One per rank.
        machines: Names of all machines, where there are several; the devices are those of the first.
    """
    ranks = Counter(map(str, devices))
    chosen = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in ranks.items())
    if machines:
        chosen += f" of {machines[0]}, one of {len(machines)}"
    line = f"flowdp: training on {chosen} | {find_devices(probe=False)}"
    if line in _told or sys.stderr is None:
        return
    _told.add(line)
    print(line, file=sys.stderr, flush=True)
