"""Descriptions of a run: aligned text before it starts, and plain values by dotted names, for loggers.

For the text the datasets are opened, as `Trainer.check()` does it, which starts no thread or process and
reads no sample; checkpoints are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from flowdp.collective.select import choose_path
from flowdp.device.discovery import look_at
from flowdp.errors import FlowdpError
from flowdp.observe.loggers.log import Setting
from flowdp.replica.batch_sizes import listed
from flowdp.replica.factories import Optimizers
from flowdp.replica.replica import Replica
from flowdp.trainer.config import RunConfig

__all__ = ["describe_run", "run_settings"]

RECORDS = ("scheduler", "cadence", "outer", "evaluation", "reading", "failures", "runtime", "checkpoint")
"""Records of options that a run may have."""


def describe_run(config: RunConfig) -> str:
    """Describe a run: a title, and a line for each of its parts."""
    lines = [f"Trainer of {_model(config)}"]
    lines += [f"  {name:<15}{value}" for name, value in _parts(config)]
    return "\n".join(lines)


def _parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    options, team = config.replica, config.team
    for rank, device in enumerate(config.devices, team.ranks.start):
        yield f"rank {rank}", f"{device} {look_at(device)}"
    if team.machines is not None:
        sizes = zip(team.machines.names, team.sizes, strict=True)
        yield "machines", ", ".join(f"{name}: {size}" for name, size in sizes)
    yield "policy", options.policy if config.world_size > 1 else "one device, so no mean is taken"
    if config.world_size > 1:
        path = choose_path(
            config.runtime.backend, options.policy, config.devices, team, overlaps=config.overlaps
        )
        yield "backend", str(path)
    yield "batch size", _batch_size(config)
    yield "steps", _steps(config)
    yield "precision", options.precision
    for name, record in _records(config).items():
        if chosen := _chosen(record):
            yield name, chosen
    if config.resume is not False:
        yield "resume", str(config.resume)
    if config.callbacks:
        yield "callbacks", ", ".join(type(callback).__name__ for callback in config.callbacks)


def _model(config: RunConfig) -> str:
    model = config.replica.model
    if not isinstance(model, nn.Module):
        return f"a model of {getattr(model, '__qualname__', 'a factory')}"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{type(model).__name__}, {trained:,} parameters"


def _batch_size(config: RunConfig) -> str:
    sizes = config.sizes
    forwards, together = sizes.forwards(config.dataset), sizes.together(config.dataset)
    if forwards is None or together is None:
        return "as the DataLoader's batches are, each for one device"
    each = "forwards of at most" if sizes.window is not None else "of each device"
    return f"{together} in all; {each} {listed(forwards)}"


def _steps(config: RunConfig) -> str:
    try:
        batches = config.check()
    except FlowdpError as error:
        return f"not known, and start() will fail: {error}"
    total = config.total_steps(batches)
    an_epoch = None if batches is None else config.sizes.steps(batches, config.replica.policy)
    return (
        f"{'not known before the end' if total is None else f'{total:,} of all devices'}; "
        f"{'an unknown number' if an_epoch is None else f'{an_epoch:,}'} in an epoch"
    )


def _chosen(record: Any) -> str:
    """Fields of an option record that are not at their defaults."""
    values = {
        field.name: getattr(record, field.name)
        for field in fields(record)
        if field.default is MISSING or getattr(record, field.name) is not field.default
    }
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: object) -> str:
    text = str(_plain(value))
    return type(value).__name__ if "\n" in text else text  # a dataset, say


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
    for name, record in _records(config).items():
        if name != "evaluation":
            settings |= {f"{name}.{field.name}": getattr(record, field.name) for field in fields(record)}
    return {name: _plain(value) for name, value in settings.items()}


def _records(config: RunConfig) -> dict[str, Any]:
    """The records of options that the run has, by their names."""
    given = {name: getattr(config.replica if name == "scheduler" else config, name) for name in RECORDS}
    return {name: record for name, record in given.items() if record is not None}


def _named(optimizers: Optimizers) -> list[tuple[str, Optimizer]]:
    if isinstance(optimizers, Mapping):
        return [(f"optimizer.{key}", optimizer) for key, optimizer in optimizers.items()]
    if len(optimizers) == 1:
        return [("optimizer", optimizers[0])]
    return [(f"optimizer.{index}", optimizer) for index, optimizer in enumerate(optimizers)]


def _plain(value: object) -> Setting:
    """A value as a number, a flag or text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0:  # a learning rate, say
        return _plain(value.item())
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return str(value)
