"""Description of a run before it starts: what it will do, as aligned text.

The datasets are opened, as `Trainer.check()` does it, which starts no thread or process and reads no sample;
checkpoints are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from torch import nn

from flowdp.collective.select import choose_path
from flowdp.device.discovery import look_at
from flowdp.errors import FlowdpError
from flowdp.replica.batch_sizes import listed
from flowdp.trainer.config import RunConfig
from flowdp.trainer.settings import plain_setting
from flowdp.trainer.start import check_run

__all__ = ["describe_run"]


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
    records = {
        "scheduler": options.scheduler,
        "cadence": config.cadence,
        "outer": config.outer,
        "evaluation": config.evaluation,
        "reading": config.reading,
        "failures": config.failures,
        "runtime": config.runtime,
        "checkpoint": config.checkpoint,
    }
    for name, record in records.items():
        if record is not None and (chosen := _chosen(record)):
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
        batches = check_run(config)
    except FlowdpError as error:
        return f"not known, and start() will fail: {error}"
    total = config.total_steps(batches)
    an_epoch = None if batches is None else config.sizes.steps(batches, config.replica.policy)
    return (
        f"{'not known before the end' if total is None else f'{total:,} of all devices'}; "
        f"{'an unknown number' if an_epoch is None else f'{an_epoch:,}'} in an epoch"
    )


def _chosen(record: object) -> str:
    """Fields of an option record that are not at their defaults."""
    values = {
        field.name: getattr(record, field.name)
        for field in fields(record)  # type: ignore[arg-type]
        if field.default is MISSING or getattr(record, field.name) is not field.default
    }
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: object) -> str:
    text = str(plain_setting(value))
    return type(value).__name__ if "\n" in text else text  # a dataset, say
