"""Discovery of devices, and the devices that an option means."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from flowdp.device.peer_copies import check_copies
from flowdp.device.streams import QUIET
from flowdp.errors import OptionError
from flowdp.validators import is_int

__all__ = [
    "DeviceInfo",
    "DeviceSummary",
    "DevicesOption",
    "choose_devices",
    "cpu_name",
    "device_names",
    "devices",
    "look_at",
    "nvml_uuid",
    "reach_each_other",
    "resolve_devices",
]

DevicesOption = Literal["auto"] | int | Sequence[torch.device | str | int]


@dataclass(frozen=True)
class DeviceInfo:
    """A device of this machine.

    Attributes:
        device: As torch names it.
        name: Its model.
        memory_bytes: All of its memory, in use or not.
        problem: Why it cannot be used; None when it can.
        peers: CUDA devices whose memory it reads without a detour through the host.
    """

    device: torch.device
    name: str
    memory_bytes: int
    problem: str | None = None
    peers: tuple[torch.device, ...] = ()

    def __str__(self) -> str:
        """`RTX 4090 (23.5 GB)`, in binary gigabytes."""
        return f"{self.name.removeprefix('NVIDIA ')} ({self.memory_bytes / 2**30:.1f} GB)"


@dataclass(frozen=True)
class DeviceSummary:
    """The devices of this machine; `str()` says it in one line.

    Attributes:
        devices: All CUDA devices, the unusable ones too; where none is usable, the CPU behind them.
    """

    devices: tuple[DeviceInfo, ...]

    @property
    def usable(self) -> tuple[DeviceInfo, ...]:
        """The devices of `devices="auto"`."""
        return tuple(info for info in self.devices if info.problem is None)

    @property
    def heterogeneous(self) -> bool:
        """Whether the usable devices are of several models."""
        return len({info.name for info in self.usable}) > 1

    def __str__(self) -> str:
        """The usable devices, then the others with the reason."""
        usable = self.usable
        if not any(info.device.type == "cuda" for info in usable):
            parts = ["no CUDA available", "CPU mode"]
        elif len(usable) == 1:
            parts = ["1 GPU", str(usable[0]), "single-device mode"]
        else:
            mixed = " (heterogeneous)" if self.heterogeneous else ""
            parts = [f"{len(usable)} GPUs{mixed}", *map(str, usable)]
        parts += [f"{info.device} unusable: {info.problem}" for info in self.devices if info.problem]
        return " | ".join(parts)


def cpu_name() -> str:
    """The model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _cpu_memory_bytes() -> int:
    """The machine's memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _problem_of(device: torch.device) -> str | None:
    """Compute something small on a device; returns the problem, if any.

    A device may be listed and still refuse: in use exclusively, of an architecture that this torch has no
    kernels for, or broken. One that has computed is not tried again, while a run may be at work on it.
    """
    if device in _fine:
        return None
    try:
        with QUIET:  # another run may be at work on other cards
            total = torch.ones(2, device=device).add_(1).sum().item()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    if total != 4:
        return f"1 + 1 gave {total / 2}"
    _fine.add(device)
    return None


_fine: set[torch.device] = set()


def _peers_of(device: torch.device) -> tuple[torch.device, ...]:
    if device.type != "cuda":
        return ()
    others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return tuple(
        other
        for other in others
        if other != device and torch.cuda.can_device_access_peer(device.index, other.index)
    )


def reach_each_other(chosen: Sequence[torch.device]) -> bool:
    """Whether each of these devices reads the memory of all others: one device, one CPU, or peer access."""
    different = set(chosen)
    return all(different <= {device, *_peers_of(device)} for device in different)


def devices(probe: bool = True) -> DeviceSummary:
    """Look at this machine.

    Args:
        probe: Whether to try each CUDA device, which makes a context on it (some 500 MB); else all that are
            listed count as usable.
    """
    found = [look_at(torch.device("cuda", index), probe) for index in range(torch.cuda.device_count())]
    if all(info.problem for info in found):
        found.append(look_at(torch.device("cpu")))
    return DeviceSummary(tuple(found))


def look_at(device: torch.device, probe: bool = False) -> DeviceInfo:
    """Look at one device.

    Args:
        device: A CUDA device or the CPU.
        probe: Whether to try it, where it is a CUDA device.
    """
    if device.type == "cpu":
        return DeviceInfo(device, cpu_name(), _cpu_memory_bytes())
    try:
        properties = torch.cuda.get_device_properties(device)
        peers = _peers_of(device)
    except RuntimeError as error:  # the driver lists it, and CUDA does not start
        return DeviceInfo(device, "CUDA device", 0, str(error).partition("\n")[0])
    problem = _problem_of(device) if probe else None
    return DeviceInfo(device, properties.name, properties.total_memory, problem, peers)


def resolve_devices(wanted: DevicesOption) -> tuple[torch.device, ...]:
    """The devices that the option `devices` means on this machine, one per rank.

    Args:
        wanted: `"auto"` is every usable CUDA device, else one CPU device. An int n is the first n usable
            CUDA devices, or, without CUDA, n replicas on the CPU. A list names one device per rank; an int
            in it is a CUDA index, as in torch, and a device may stand in it several times.

    Raises:
        OptionError: This machine has no such device, it cannot be used, or copies between two arrive wrong.
    """
    by_name = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    chosen = choose_devices(wanted, devices(probe=not by_name))
    for device in dict.fromkeys(chosen):  # those alone: a context costs memory
        if device.type == "cuda" and (problem := _problem_of(device)):
            raise OptionError(f"devices: {device} cannot be used: {problem}")
    check_copies(chosen)
    return chosen


def choose_devices(wanted: DevicesOption, there: DeviceSummary) -> tuple[torch.device, ...]:
    """The devices that `wanted` means on a machine that has `there`; `resolve_devices` says how.

    Raises:
        OptionError: That machine has no such device.
    """
    if isinstance(wanted, str):
        if wanted != "auto":
            raise OptionError(f"devices must be 'auto', an int or a list, not {wanted!r}: try [{wanted!r}]")
        return tuple(info.device for info in there.usable)
    if is_int(wanted):
        return _first(wanted, there)
    if not isinstance(wanted, Sequence):
        raise OptionError(f"devices must be 'auto', an int or a list, not {wanted!r}")
    if not wanted:
        raise OptionError("devices is empty: name at least one, or pass 'auto'")
    return tuple(_one(entry, there) for entry in wanted)


def _first(count: int, there: DeviceSummary) -> tuple[torch.device, ...]:
    if count < 1:
        raise OptionError(f"devices as an int is how many, at least 1, not {count}")
    usable = tuple(info.device for info in there.usable)
    if usable == (torch.device("cpu"),):
        return usable * count
    if count > len(usable):
        raise OptionError(f"devices={count}, but this machine has {_there(there)}: name one twice in a list")
    return usable[:count]


def _one(entry: torch.device | str | int, there: DeviceSummary) -> torch.device:
    """One entry of a list of devices."""
    if isinstance(entry, bool) or not isinstance(entry, (torch.device, str, int)):
        raise OptionError(f"devices: one is a torch.device, a string or a CUDA index, not {entry!r}")
    try:
        device = torch.device("cuda", entry) if isinstance(entry, int) else torch.device(entry)
    except RuntimeError as error:
        raise OptionError(
            f"devices: {entry!r} is no device of torch: this machine has {_there(there)}"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")  # torch takes cpu:1, and means the one CPU by it
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    for info in there.devices:
        if info.device == device and info.problem:
            raise OptionError(f"devices: {device} cannot be used: {info.problem}")
        if info.device == device:
            return device
    raise OptionError(f"devices: {entry!r} is not here: this machine has {_there(there)}")


def _there(there: DeviceSummary) -> str:
    found = dict.fromkeys([*(info.device for info in there.usable), torch.device("cpu")])
    return ", ".join(map(str, found))


def device_names(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """Names of the ranks' devices, with the rank where several ranks have one. Shape (world_size,)."""
    return tuple(
        f"{device} (rank {rank})" if devices.count(device) > 1 else str(device)
        for rank, device in enumerate(devices)
    )


def nvml_uuid(device: torch.device) -> str:
    """Identifier of a CUDA device for NVML, which counts devices in another order than CUDA."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
