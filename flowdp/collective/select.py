"""Choice of a run's collective: the path of the bytes, never the order of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from flowdp.collective.base import Collective
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean
from flowdp.collective.nccl_loop import NcclLoop
from flowdp.device.discovery import reach_each_other
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import Lane
from flowdp.errors import CollectiveError
from flowdp.machine.policies import ROUNDS
from flowdp.options import Backend, LoopBackend, Policy
from flowdp.threads.shield import interrupts_held

__all__ = ["open_collective", "open_loop"]

log = logging.getLogger("flowdp")


def open_collective(
    backend: Backend,
    policy: Policy,
    replicas: Sequence[FlatTensors],
    lanes: Sequence[Lane],
    meet: Callable[[int], None],
    hung: Callable[[CollectiveError], object],
) -> Collective:
    """The collective of a run.

    Args:
        backend: As the user said. "auto" is the first of these that works here: NCCL for several CUDA
            devices, one rank each, unless the policy is async (a kernel that waits for its peers may only be
            launched while all stand at the gate); local where the devices reach each other; host memory.
        policy: Averaging policy.
        replicas: One per rank.
        lanes: One per rank.
        meet: The second meeting at the gate, for collectives whose members work together on the host.
        hung: Called, on another thread, when a round does not end on the devices, just before it is aborted.

    Raises:
        CollectiveError: backend="nccl" was asked for and does not work here.
        OptionError: The replicas differ in structure.

    Threads:
        The one that starts the run, before any other thread of it exists.
    """
    chosen = [lane.device for lane in lanes]
    if len(chosen) > 1:
        if backend == "nccl":
            return NcclMean(replicas, lanes, hung=hung)
        if backend == "auto" and _is_one_each(chosen) and ROUNDS[policy].averages != "snapshots":
            try:
                return NcclMean(replicas, lanes, hung=hung)
            except CollectiveError as error:
                log.warning("averaging without NCCL: %s", error)
        if backend == "cpu" or (backend == "auto" and not reach_each_other(chosen)):
            return HostMean(replicas, lanes, meet)
    return DeviceMean(replicas, lanes) if lanes[0].is_async else HostMean(replicas, lanes, meet)


def open_loop(
    backend: LoopBackend, lanes: Sequence[Lane], sizes: Mapping[torch.dtype, int]
) -> NcclLoop | None:
    """NCCL for a loop that one thread drives; None: copies by the ranks.

    Args:
        backend: As the user said. "auto" is NCCL for several CUDA devices, one rank each, where it works.
        lanes: One per rank.
        sizes: As `NcclLoop`.

    Raises:
        CollectiveError: backend="nccl" was asked for and does not work here.
    """
    chosen = [lane.device for lane in lanes]
    if len(chosen) > 1:
        if backend == "nccl":
            return NcclLoop(lanes, sizes, interrupts_held)
        if backend == "auto" and _is_one_each(chosen):
            try:
                return NcclLoop(lanes, sizes, interrupts_held)
            except CollectiveError as error:
                log.warning("gradients are summed without NCCL: %s", error)
    return None


def _is_one_each(chosen: Sequence[torch.device]) -> bool:
    return len(set(chosen)) == len(chosen) and all(device.type == "cuda" for device in chosen)
