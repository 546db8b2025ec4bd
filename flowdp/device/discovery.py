"""Discovery of devices, and the devices that an option means."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from flowdp.device.accelerator import accelerator_devices, device_module, is_accelerator, obstacle, untried
from flowdp.device.copies import check_copies
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
    "device_uuid",
    "devices",
    "look_at",
    "reach_each_other",
    "resolve_devices",
]

log = logging.getLogger("flowdp")

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
        devices: All of the machine's accelerator, the unusable ones too; where none is usable, the CPU behind
            them.
    """

    devices: tuple[DeviceInfo, ...]

    @property
    def kind(self) -> str:
        """Type of the accelerators, as torch names it; "cuda" where there is none."""
        return next((info.device.type for info in self.devices if is_accelerator(info.device)), "cuda")

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
        kind = "GPU" if self.kind == "cuda" else self.kind.upper()
        if not any(is_accelerator(info.device) for info in usable):
            parts = ["no CUDA available", "CPU mode"]
        elif len(usable) == 1:
            parts = [f"1 {kind}", str(usable[0]), "single-device mode"]
        else:
            mixed = " (heterogeneous)" if self.heterogeneous else ""
            parts = [f"{len(usable)} {kind}s{mixed}", *map(str, usable)]
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
    kernels for, or broken; and some of Intel's compute no float64, or do not tell how much memory is free.
    One that has computed is not tried again, while a run may be at work on it.
    """
    if device in _fine:
        return None
    try:
        with QUIET:  # another run may be at work on other cards
            total = torch.ones(2, dtype=torch.float64, device=device).add_(1).sum().item()
            if is_accelerator(device):
                device_module(device).mem_get_info(device)
    except (RuntimeError, TypeError) as error:  # the latter: a backend without float64
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
    """List the devices of this machine, and the reason why one cannot be used.

    Args:
        probe: Whether to try each accelerator, which makes a context on it (on CUDA some 500 MB); else all
            that are listed count as usable.
    """
    found = [look_at(device, probe) for device in accelerator_devices()]
    if all(info.problem for info in found):
        found.append(look_at(torch.device("cpu")))
    return DeviceSummary(tuple(found))


def look_at(device: torch.device, probe: bool = False) -> DeviceInfo:
    """Look at one device.

    Args:
        device: An accelerator or the CPU.
        probe: Whether to try it, where it is an accelerator.
    """
    if not is_accelerator(device):
        return DeviceInfo(device, cpu_name(), _cpu_memory_bytes())
    name = f"{device.type.upper()} device"
    if (problem := obstacle(device.type)) is not None:
        return DeviceInfo(device, name, 0, problem)
    try:
        properties = device_module(device).get_device_properties(device)
        peers = _peers_of(device)
    except RuntimeError as error:  # the driver lists it, and CUDA does not start
        return DeviceInfo(device, name, 0, str(error).partition("\n")[0])
    problem = _problem_of(device) if probe else None
    return DeviceInfo(device, properties.name, properties.total_memory, problem, peers)


def resolve_devices(wanted: DevicesOption) -> tuple[torch.device, ...]:
    """The devices that the option `devices` means on this machine, one per rank.

    Args:
        wanted: `"auto"` is every usable device of the machine's accelerator (CUDA, for instance), else one
            CPU device. An int n is the first n of them, or, where there is none, n replicas on the CPU. A
            list names one device per rank; an int in it is the index of an accelerator, as in torch, and a
            device may stand in it several times.

    Raises:
        OptionError: This machine has no such device, it cannot be used, or copies between two arrive wrong.
    """
    by_name = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    chosen = choose_devices(wanted, devices(probe=not by_name))
    for device in dict.fromkeys(chosen):  # those alone: a context costs memory
        if is_accelerator(device) and (problem := _problem_of(device)):
            raise OptionError(f"devices: {device} cannot be used: {problem}")
    check_copies(chosen)
    for platform_name in filter(None, map(untried, sorted({device.type for device in chosen}))):
        log.warning(
            "flowdp has never been run on %s: its code for CUDA is what runs there. Compare a short run with "
            "one on devices=['cpu'] before you trust a long one",
            platform_name,
        )
    return chosen


def choose_devices(wanted: DevicesOption, there: DeviceSummary) -> tuple[torch.device, ...]:
    """The devices that `wanted` means on a machine that has `there`; `resolve_devices` says how.

    Raises:
        OptionError: That machine has no such device.
    """
    if isinstance(wanted, str) and wanted == "auto":
        return tuple(info.device for info in there.usable)
    if is_int(wanted):
        return _first(wanted, there)
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        raise OptionError(f"devices must be 'auto', an int or a list such as ['cpu', 'cpu'], not {wanted!r}")
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
        raise OptionError(
            f"devices: one is a torch.device, a string or the index of an accelerator, not {entry!r}"
        )
    try:
        device = torch.device(there.kind, entry) if isinstance(entry, int) else torch.device(entry)
    except RuntimeError as error:
        raise OptionError(
            f"devices: {entry!r} is no device of torch: this machine has {_there(there)}"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")  # torch takes cpu:1, and means the one CPU by it
    if device.index is None:
        device = torch.device(device.type, 0)
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


def device_uuid(device: torch.device) -> str | None:
    """Identifier of an accelerator, the same in all processes; None where torch has none.

    Of a CUDA device it is NVML's, which counts devices in another order than CUDA.
    """
    uuid = getattr(device_module(device).get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    return str(uuid) if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
