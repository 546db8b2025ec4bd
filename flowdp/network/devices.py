"""Devices of the machines of a job: no accelerator may belong to two processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from flowdp.device.accelerator import is_accelerator
from flowdp.device.discovery import device_uuid
from flowdp.errors import OptionError
from flowdp.network.machines import Machines

__all__ = ["check_devices"]

SEVERAL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable of the environment by which several of its ranks may have one device."""


def check_devices(machines: Machines, chosen: Sequence[torch.device]) -> None:
    """Check that no accelerator is used by two processes of a job, unless NCCL is told that it may be.

    Args:
        machines: All of them; each makes this call.
        chosen: Devices of this one.

    Raises:
        CollectiveError: A machine was lost.
        OptionError: Two of them have the same one; every machine raises it.
    """
    cards = list(filter(is_accelerator, dict.fromkeys(chosen)))
    if os.environ.get(SEVERAL_RANKS) == "1":
        cards = []
    uuids = {card: uuid for card in cards if (uuid := device_uuid(card)) is not None}
    there = machines.gather([(uuid, f"{card} of {socket.gethostname()}") for card, uuid in uuids.items()])
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
