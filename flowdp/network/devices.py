"""Devices of the machines of a job: no CUDA device may belong to two processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from flowdp.device.discovery import nvml_uuid
from flowdp.errors import OptionError
from flowdp.network.machines import Machines

__all__ = ["check_devices"]

SEVERAL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable of the environment by which several of its ranks may have one device."""


def check_devices(machines: Machines, chosen: Sequence[torch.device]) -> None:
    """Check that no CUDA device is used by two processes of a job, unless NCCL is told that it may be.

    Args:
        machines: All of them; each makes this call.
        chosen: Devices of this one.

    Raises:
        CollectiveError: A machine was lost.
        OptionError: Two of them have the same CUDA device; every machine raises it.
    """
    cards = [device for device in dict.fromkeys(chosen) if device.type == "cuda"]
    if os.environ.get(SEVERAL_RANKS) == "1":
        cards = []
    there = machines.gather([(nvml_uuid(card), f"{card} of {socket.gethostname()}") for card in cards])
    owner: dict[str, int] = {}
    for machine, named in enumerate(there):
        for uuid, name in named:
            if uuid in owner:
                raise OptionError(
                    f"{machines.names[owner[uuid]]} and {machines.names[machine]} both train on {name}: "
                    "start one process on each host, which trains on all of its devices, or give each its "
                    f"own ({SEVERAL_RANKS}=1 in the environment allows it, for tests on one card)"
                )
            owner[uuid] = machine
