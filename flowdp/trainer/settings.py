"""Settings of a run as plain values by dotted names: the hyper-parameters that loggers write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from flowdp.observe.loggers.log import Setting
from flowdp.replica.batch_sizes import listed
from flowdp.replica.factories import Optimizers
from flowdp.replica.replica import Replica
from flowdp.trainer.config import RunConfig

__all__ = ["plain_setting", "run_settings"]


def run_settings(config: RunConfig, replica: Replica) -> dict[str, Setting]:
    """Settings of a run by dotted names; values that are no number, flag or string are written as text.

    Args:
        config: Its settings.
        replica: One of its replicas, before the first step: model and optimizers as they were built.
    """
    options, sizes = config.replica, config.sizes
    forwards = sizes.forwards(config.dataset)
    trained = [parameter.numel() for parameter in replica.module.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {
        "model": type(replica.module).__name__,
        "parameters": sum(trained),
        "devices": ", ".join(map(str, config.devices)),
        "world_size": config.world_size,
        "policy": options.policy,
        "batch_size": sizes.together(config.dataset),
        "per_device_batch_size": None if forwards is None else listed(forwards),
        "epochs": config.epochs,
        "max_steps": config.max_steps,
        "seed": options.seed,
        "precision": options.precision,
        "max_grad_norm": options.max_grad_norm,
        "max_grad_value": options.max_grad_value,
        "torch": str(torch.__version__),
    }
    for name, optimizer in _named(replica.optimizers):
        settings[name] = type(optimizer).__name__
        for group, values in enumerate(optimizer.param_groups):
            prefix = f"{name}.group{group}" if len(optimizer.param_groups) > 1 else name
            settings |= {f"{prefix}.{key}": value for key, value in values.items() if key != "params"}
    for name in ("scheduler", "cadence", "outer", "reading", "failures", "runtime", "checkpoint"):
        record = options.scheduler if name == "scheduler" else getattr(config, name)
        if record is not None:
            settings |= {f"{name}.{field.name}": getattr(record, field.name) for field in fields(record)}
    return {name: plain_setting(value) for name, value in settings.items()}


def _named(optimizers: Optimizers) -> list[tuple[str, Optimizer]]:
    if isinstance(optimizers, Mapping):
        return [(f"optimizer.{key}", optimizer) for key, optimizer in optimizers.items()]
    if len(optimizers) == 1:
        return [("optimizer", optimizers[0])]
    return [(f"optimizer.{index}", optimizer) for index, optimizer in enumerate(optimizers)]


def plain_setting(value: object) -> Setting:
    """A value as a number, a flag or text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0:  # a learning rate, say
        return plain_setting(value.item())
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return str(value)
