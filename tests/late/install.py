"""Puts an emulated machine in the place of `torch.cuda`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from flowdp.collective import nccl, nccl_loop
from flowdp.device import copies, discovery, streams
from flowdp.device.streams import StreamLane
from flowdp.policy.worth import LaunchWatch
from tests.fakes import hide_modes
from tests.late.device import LateCuda
from tests.late.dispatch import LateMode
from tests.late.nccl import LateNccl
from tests.late.tensors import methods

__all__ = ["installed"]

FUNCTIONS = (
    *("Stream", "Event", "current_device", "current_stream", "default_stream", "stream", "device"),
    *("device_count", "get_device_properties", "can_device_access_peer", "mem_get_info", "memory_stats"),
    *("reset_peak_memory_stats", "empty_cache", "synchronize", "get_rng_state", "set_rng_state"),
    *("manual_seed", "manual_seed_all"),
)


def accelerator(check_available: bool = False) -> torch.device | None:
    """See `torch.accelerator.current_accelerator`; torch itself asks for one that is available."""
    return None if check_available else torch.device("cuda")


@contextmanager
def installed(cuda: LateCuda) -> Iterator[LateCuda]:
    """Let `torch.cuda` be this machine, in all threads.

    Raises:
        AssertionError: The machine has CUDA devices of its own: torch's C++ would not start them any more.
    """
    assert not torch.cuda.is_available(), "torch.cuda is at work already"
    moves = threading.local()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name in FUNCTIONS:
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        patch.setattr(torch.cuda, "default_generators", cuda.generators)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", accelerator)
        patch.setattr(torch.accelerator, "device_count", cuda.device_count)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        for name, method in methods(cuda, moves).items():
            patch.setattr(torch.Tensor, name, method)
        hide_modes(patch.setattr, LateMode)
        _patch_autocast(patch)
        _patch_groups(patch)
        _patch_lanes(patch, cuda)
        _patch_nccl(patch, cuda)
        for module in (discovery, copies):
            patch.setattr(module, "_fine", set())
        start = threading.Thread.start

        def start_in_mode(thread: threading.Thread) -> None:
            work = thread.run

            def run() -> None:
                with LateMode(cuda, moves):
                    work()

            thread.run = run  # type: ignore[method-assign]
            start(thread)

        patch.setattr(threading.Thread, "start", start_in_mode)
        # Else `torch.tensor(data, device=...)` would move the data below the mode.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(LateMode(cuda, moves))
        yield cuda
        cuda.synchronize_all()


def _patch_autocast(patch: pytest.MonkeyPatch) -> None:
    """Let autocast of CUDA be that of the CPU.

    Without its cache: torch holds the cache's lock while it casts, and so while a mode waits for the
    interpreter's lock; a thread that leaves autocast wants them the other way round.
    """
    autocast, is_enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype

    def of_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return autocast(
            "cpu" if device_type == "cuda" else device_type, *args, **{**kwargs, "cache_enabled": False}
        )

    patch.setattr(torch, "autocast", of_cpu)
    patch.setattr(
        torch, "is_autocast_enabled", lambda kind="cuda": is_enabled("cpu" if kind == "cuda" else kind)
    )
    patch.setattr(torch, "get_autocast_dtype", lambda kind: dtype("cpu" if kind == "cuda" else kind))


def _patch_groups(patch: pytest.MonkeyPatch) -> None:
    """Let optimizers and norms group tensors by the devices that these say."""
    grouped: Callable[..., Any] = torch._C._group_tensors_by_device_and_dtype

    def by_device(lists: Any, with_indices: bool = False) -> Any:
        found = grouped(lists, with_indices)
        return {
            (tensors[0][0].device, dtype): (tensors, *rest) for (_, dtype), (tensors, *rest) in found.items()
        }

    patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", by_device)


def _patch_lanes(patch: pytest.MonkeyPatch, cuda: LateCuda) -> None:
    """Let lanes be made anew, and their streams know their roles."""

    def make(lane: StreamLane, device: torch.device, _cuda: Any = None) -> None:
        true_init(lane, device, cuda)
        for role in ("compute", "comm", "copy"):
            cuda.name(getattr(lane, role), role)

    def aside(lane: StreamLane, number: int) -> Any:
        stream = true_aside(lane, number)
        cuda.name(stream, "aside")  # type: ignore[arg-type]
        return stream

    def await_caller(lane: StreamLane, stream: Any = None) -> None:
        if not cuda.is_removed(sys._getframe(1)):
            true_caller(lane, stream)

    def await_default(lane: StreamLane, stream: Any, device: torch.device) -> None:
        if not cuda.is_removed(sys._getframe(1)):
            true_default(lane, stream, device)

    true_init, true_aside = StreamLane.__init__, StreamLane.aside
    true_caller, true_default = StreamLane.await_caller, StreamLane.await_default
    patch.setattr(StreamLane, "await_caller", await_caller)
    patch.setattr(StreamLane, "await_default", await_default)
    patch.setattr(StreamLane, "__init__", make)
    patch.setattr(StreamLane, "aside", aside)
    patch.setattr(streams, "_made", {})
    # There are no graphs here; and the times of late streams say nothing about a card's.
    patch.setattr(LaunchWatch, "take", lambda watch, launch_ms, device_ms: None)


def _patch_nccl(patch: pytest.MonkeyPatch, cuda: LateCuda) -> None:
    """Let flowdp find NCCL where each rank has a device of its own."""

    for module in (nccl, nccl_loop):
        patch.setattr(module, "load", lambda: LateNccl(cuda))
