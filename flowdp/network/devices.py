"""Devices of the machines of a job: no CUDA device may belong to two processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from flowdp.device.discovery import nvml_uuid
from flowdp.errors import OptionError
from flowdp.network.machines import Machines

__all__ = ["check_devices"]


def check_devices(machines: Machines, chosen: Sequence[torch.device]) -> None:
    """Check that no CUDA device is used by two processes of a job.

    Args:
        machines: All of them; each makes this call.
        chosen: Devices of this one.

    Raises:
        CollectiveError: A machine was lost.
        OptionError: Two of them have the same CUDA device; every machine raises it.
    """
    cards = [device for device in dict.fromkeys(chosen) if device.type == "cuda"]
    there = machines.gather([(nvml_uuid(card), f"{card} of {socket.gethostname()}") for card in cards])
    owner: dict[str, int] = {}
    for machine, named in enumerate(there):
        for uuid, name in named:
            if uuid in owner:
                raise OptionError(
                    f"{machines.names[owner[uuid]]} and {machines.names[machine]} both train on {name}: "
                    "start one process on each host, which trains on all of its devices, or give each its own"
                )
            owner[uuid] = machine
