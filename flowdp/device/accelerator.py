"""The machine's accelerator: its type, its devices, and the module of torch that drives them.

`torch.cuda`, `torch.xpu` and the modules of other backends have one interface for streams, events, memory and
generators. All of flowdp takes the module from here, and names CUDA only where nothing else is meant: NCCL,
graphs, peer access, NVML, TF32. On ROCm `torch.cuda` is HIP.

To import it starts no driver.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

__all__ = [
    "accelerator_devices",
    "accelerator_type",
    "default_stream",
    "device_generator",
    "device_module",
    "is_accelerator",
    "obstacle",
    "started_devices",
    "untried",
]

INTERFACE = (
    *("Event", "Stream", "current_stream", "device", "device_count", "stream"),
    *("get_device_properties", "empty_cache", "mem_get_info", "memory_stats", "reset_peak_memory_stats"),
    *("current_device", "default_generators", "is_initialized", "manual_seed"),
)
"""Names of a device module that flowdp uses, on every accelerator."""


def accelerator_type() -> str | None:
    """Type of the machine's accelerator, as torch names it ("cuda"); None: this torch is for the CPU."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def accelerator_devices() -> list[torch.device]:
    """All devices of the machine's accelerator, the unusable ones too."""
    kind = accelerator_type()
    if kind is None:
        return []
    # A backend may not even count its devices; `obstacle` says so where one is wanted.
    can_count = hasattr(getattr(torch, kind, None), "device_count")
    count = torch.accelerator.device_count() if can_count else 1
    return [torch.device(kind, index) for index in range(count)]


def started_devices() -> list[torch.device]:
    """Devices of the machine's accelerator once torch has started it; before, they have drawn nothing."""
    kind = accelerator_type()
    if kind is None or obstacle(kind) or not torch.get_device_module(kind).is_initialized():
        return []
    return accelerator_devices()


def is_accelerator(device: torch.device) -> bool:
    """Whether a device works behind its host, on streams."""
    return device.type != "cpu"


def device_module(device: torch.device) -> Any:
    """The module of torch that drives an accelerator: `torch.cuda`, `torch.xpu`."""
    return torch.get_device_module(device)


def device_generator(device: torch.device) -> torch.Generator:
    """The generator from which operations on a device draw, if they are given none.

    Args:
        device: The CPU; or an accelerator with its index, which torch has started.
    """
    if not is_accelerator(device):
        return torch.default_generator
    generator: torch.Generator = device_module(device).default_generators[device.index]
    return generator


def default_stream(module: Any, device: torch.device) -> Any:
    """The stream of a device on which work goes that names none.

    Args:
        module: The one that drives the device.
        device: An accelerator.
    """
    if hasattr(module, "default_stream"):
        return module.default_stream(device)
    with ThreadPoolExecutor(1) as fresh:  # torch.xpu has no name for it: a new thread's current one
        return fresh.submit(module.current_stream, device).result()


def obstacle(kind: str) -> str | None:
    """Reason why flowdp cannot train on devices of a type; None: torch has the interface for it."""
    if kind == "mps":
        return (
            "flowdp computes means in float64 and works on several streams, and on Metal there is no float64 "
            "and one stream; pass devices=['cpu']"
        )
    module = getattr(torch, kind, None)
    missing = [name for name in INTERFACE if not hasattr(module, name)]
    if missing:
        return f"flowdp needs {', '.join(missing)}, which torch.{kind} does not have; pass devices=['cpu']"
    return None


def untried(kind: str) -> str | None:
    """Name of a platform on which flowdp has never been run; None of CUDA and the CPU."""
    if kind == "cuda":
        return None if torch.version.hip is None else "ROCm"
    return None if kind == "cpu" else kind.upper()
