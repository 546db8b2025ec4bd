"""Checks of the arguments of `setup`, before a thread starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from flowdp.collective.batch_norm import SharedStatistics, check_sync_batch_norm
from flowdp.data_parallel.layout import Layout
from flowdp.data_parallel.loss_context import BatchPlan, LossFunction
from flowdp.device.discovery import devices as find_devices
from flowdp.device.structure import structure
from flowdp.errors import OptionError
from flowdp.options import Buffers, CadenceOptions, LoopBackend, ProcessTuning
from flowdp.replica.factories import check_plain
from flowdp.validators import check_flag, check_function, check_number, one_of

__all__ = ["LoopOptions", "check_cadence", "check_layers", "check_loss", "check_model"]


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The options of `setup`, checked; see there.

    Attributes:
        devices: One per rank.
        plan: Processing of each batch of a window.
        cadence: Options of the windows, and the speed hint.
        windows: Whether `epoch` yields windows of whole batches.
        buffers: Which devices' buffers count.
        max_grad_norm: `step` clips to it; None: not at all.
        ratios: Fixed shares of each batch, summing to 1; None: by measured speed. Shape (world_size,).
        layout: How calls are cut and their outputs joined.
        check: Whether calls that are cut are compared with one device.
        backend: Transfer between CUDA devices.
        tuning: Settings of the process.
        capture: Whether calls are recorded as CUDA graphs.
        timeline: Whether a timeline is kept; a path: where it is saved at the end.

    Raises:
        OptionError: One of them is of the wrong kind.
    """

    devices: tuple[torch.device, ...]
    plan: BatchPlan
    cadence: CadenceOptions
    windows: bool
    buffers: Buffers
    max_grad_norm: float | None
    ratios: tuple[float, ...] | None
    layout: Layout
    check: bool
    backend: LoopBackend
    tuning: ProcessTuning
    capture: bool | Literal["auto"]
    timeline: bool | Path

    def __post_init__(self) -> None:
        """Check those that come as they were given."""
        check_number("max_grad_norm", self.max_grad_norm, above=True, optional=True)
        one_of("buffers", self.buffers, Buffers)
        check_flag("check", self.check)


def check_model(model: object) -> None:
    """Check that the model is a module of parameters with shapes.

    Raises:
        OptionError: It is no module, or is not complete.
    """
    if not isinstance(model, nn.Module):
        if isinstance(model, Optimizer):
            raise OptionError("model and optimizer are swapped: flowdp.setup(model, optimizer)")
        raise OptionError(f"model must be a torch.nn.Module, not {model!r}; a factory is called first")
    check_plain(model)
    structure(model)  # raises where a tensor has no shape yet


def check_loss(loss_fn: object) -> LossFunction | None:
    """Check that `loss_fn` is a function, or None; returns it.

    Raises:
        OptionError: It is something else.
    """
    check_function("loss_fn", loss_fn, "a LossContext")
    return cast("LossFunction | None", loss_fn)


def check_cadence(
    option: object, devices: Sequence[torch.device], ratios: Sequence[float] | None = None
) -> tuple[CadenceOptions, bool]:
    """The options of a cadence, and whether there are windows; fixed `ratios` cut each batch.

    Raises:
        OptionError: It is no cadence, or does not go with fixed shares.
    """
    if ratios is not None:
        if option:
            raise OptionError(
                f"cadence={option!r} sizes the work by measured speed, and partition_ratios fixes it: leave "
                "one of them out"
            )
        option = False
    if option is not None and not isinstance(option, (bool, CadenceOptions)):
        raise OptionError(f"cadence must be None, True, False or a CadenceOptions, not {option!r}")
    options = option if isinstance(option, CadenceOptions) else CadenceOptions()
    if options.speed_hint is not None and options.speed_hint[0] >= len(devices):
        raise OptionError(f"cadence.speed_hint names rank {options.speed_hint[0]} of {len(devices)} devices")
    if option is None:
        names = {info.device: info.name for info in find_devices(probe=False).devices}
        return options, len({names.get(device, device.type) for device in devices}) > 1
    return options, option is not False and options.windows and len(devices) > 1


def check_layers(model: nn.Module, devices: Sequence[torch.device], *, windows: bool) -> None:
    """Check that SyncBatchNorm can be synchronised.

    Raises:
        OptionError: With SyncBatchNorm, the devices are of several kinds or work through batches of their
            own.
    """
    if windows and len(devices) > 1 and SharedStatistics(model):
        raise OptionError(
            "SyncBatchNorm takes the statistics of one batch from all devices, and in windows each device "
            "works through batches of its own: give setup(..., cadence=False), which cuts each batch"
        )
    check_sync_batch_norm(model, "exact", devices)
