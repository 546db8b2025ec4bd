"""Choice of a run's collective: the path of the bytes, never the order of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flowdp.collective.base import Collective
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean, open_nccl_machines
from flowdp.collective.nccl_loop import NcclLoop
from flowdp.device.discovery import reach_each_other
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import Lane
from flowdp.errors import CollectiveError, MachineLostError
from flowdp.machine.policies import ROUNDS
from flowdp.network.team import Team
from flowdp.options import Backend, LoopBackend, OuterOptions, Policy

__all__ = ["Path", "choose_path", "open_collective", "open_loop"]

log = logging.getLogger("flowdp")


@dataclass(frozen=True)
class Path:
    """Path of the bytes of a run's means.

    Attributes:
        backend: Its name.
        reason: Reason for the choice, in words.
        fallback: Path that is taken where this one cannot be opened; None: that is an error.
    """

    backend: Literal["nccl", "local", "cpu"]
    reason: str
    fallback: Path | None = None

    def __str__(self) -> str:
        """`nccl: ...; where it cannot be opened, local`."""
        other = "" if self.fallback is None else f"; where it cannot be opened, {self.fallback.backend}"
        return f"{self.backend}: {self.reason}{other}"


def choose_path(
    backend: Backend,
    policy: Policy,
    devices: Sequence[torch.device],
    team: Team | None = None,
    *,
    overlaps: bool = False,
) -> Path:
    """Choose the path of a run's means.

    "auto" is the first of these: NCCL for several CUDA devices, one rank each, unless the policy is async (a
    kernel that waits for its peers may only be launched while all stand at the gate); local where the devices
    reach each other; host memory. Between machines it is NCCL under the same condition, where their means
    are waited for and travel as they are; else host memory and torch.distributed.

    Args:
        backend: As the user said.
        policy: Averaging policy.
        devices: One for each rank of this machine.
        team: The ranks of all machines; None: these are all.
        overlaps: Means of all machines travel while the machines train on.

    Threads:
        With several machines, any; nothing is asked of the others.
    """
    if team is not None and team.is_spread:
        return _between_machines(backend, devices, team, overlaps=overlaps)
    if len(devices) == 1:
        return Path("local", "one device")
    if backend != "auto":
        return Path(backend, "as given")
    if not reach_each_other(devices):
        other = Path("cpu", "through host memory, for not each device reads the memory of all others")
    elif all(device.type == "cpu" for device in devices):
        other = Path("local", "all devices are this process's CPU")
    else:
        other = Path("local", "each device reads the memory of all others")
    if not _is_one_each(devices):
        return other
    if ROUNDS[policy].averages == "snapshots":
        return replace(other, reason=f"{other.reason}, and NCCL would wait for all of them at once")
    return Path("nccl", "CUDA devices with one rank each", other)


def open_collective(
    backend: Backend,
    policy: Policy,
    replicas: Sequence[FlatTensors],
    lanes: Sequence[Lane],
    meet: Callable[[int], None],
    outer: OuterOptions | None = None,
    team: Team | None = None,
    *,
    overlaps: bool = False,
) -> Collective:
    """The collective of a run.

    Args:
        backend: As the user said; see `choose_path` for "auto".
        policy: Averaging policy.
        replicas: One per rank.
        lanes: One per rank.
        meet: The second meeting at the gate, for collectives whose members work together on the host.
        outer: Outer step behind each mean; None: there is none. It begins at the parameters that are there.
        team: The ranks of all machines; None: these replicas are all. With several machines, each makes this
            call.
        overlaps: Their means travel while the machines train on.

    Raises:
        CollectiveError: backend="nccl" was asked for and does not work here.
        OptionError: A rank trains on the CPU, and backend="nccl" was asked for.

    Threads:
        The one that starts the run, before any other thread of it exists.
    """
    path = choose_path(backend, policy, [lane.device for lane in lanes], team, overlaps=overlaps)
    machines = None if team is None else team.machines
    if machines is not None and not all(machines.gather(path.backend == "nccl")):
        path = path.fallback or path  # another machine may have other devices
    if path.backend == "nccl":
        try:
            if team is None or machines is None:
                return NcclMean(replicas, lanes, outer=outer)
            return open_nccl_machines(replicas, lanes, team, outer)
        except MachineLostError:
            raise
        except CollectiveError as error:
            if path.fallback is None:
                raise
            log.warning("averaging without NCCL: %s", error)
            path = path.fallback
    if path.backend == "local" and lanes[0].is_async:
        return DeviceMean(replicas, lanes, outer)
    return HostMean(replicas, lanes, meet, outer, team, overlaps=overlaps)


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
    devices = [lane.device for lane in lanes]
    if len(devices) == 1 or backend == "local" or (backend == "auto" and not _is_one_each(devices)):
        return None
    try:
        return NcclLoop(lanes, sizes)
    except CollectiveError as error:
        if backend == "nccl":
            raise
        log.warning("gradients are summed without NCCL: %s", error)
    return None


def _between_machines(
    backend: Backend, devices: Sequence[torch.device], team: Team, *, overlaps: bool
) -> Path:
    """The path between machines, as far as this one knows."""
    host = Path("cpu", "through host memory, and torch.distributed between machines")
    if backend == "nccl":
        return Path("nccl", "as given, between machines, too")
    if backend == "auto" and _is_one_each(devices) and not overlaps and team.options.payload == "full":
        return Path("nccl", "CUDA devices with one rank each, between machines, too", host)
    return host


def _is_one_each(chosen: Sequence[torch.device]) -> bool:
    return len(set(chosen)) == len(chosen) and all(device.type == "cuda" for device in chosen)
