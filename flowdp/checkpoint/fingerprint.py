"""Properties of a run that must be equal where its checkpoint is resumed, and their differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flowdp.checkpoint.file import plain
from flowdp.data.source import Source
from flowdp.device.structure import difference, structure
from flowdp.protocol.position import Position

__all__ = ["SHOWN", "differences", "fingerprint", "orders"]

SHOWN = 5
"""Differences of a model that are named."""


def fingerprint(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    *,
    dataset_length: int | None,
    monitor: Sequence[str] | None = None,
    **order: Any,
) -> dict[str, Any]:
    """Description of a run for its checkpoints, as plain data.

    Args:
        module: The model, on any device.
        optimizers: Optimizers of a replica, in order.
        dataset_length: Samples of the dataset; None where it has no length.
        monitor: Name and mode of early stopping's metric; another one is no reason to refuse.
        order: Settings that decide which samples a batch of an epoch has, by the names of the user's
            arguments: batch_size, seed, shuffle, drop_last and the like.

    Raises:
        CheckpointError: An argument is not plain.
    """
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    said: dict[str, Any] = plain(
        {
            "model": structure(module, as_saved=True),
            "optimizers": kinds,
            "dataset_length": dataset_length,
            "monitor": monitor,
            "order": order,
        }
    )
    return said


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, inside_epoch: bool) -> list[str]:
    """Why a run cannot go on from a checkpoint; empty where it can.

    Args:
        saved: Fingerprint of the checkpoint.
        now: That of the run.
        inside_epoch: Whether the checkpoint lies inside an epoch: then its batches must be the same ones.
    """
    found = []
    if model := difference(saved["model"], now["model"], "in the checkpoint", "here", SHOWN):
        found.append(f"another model: {model}")
    # Another one would take its state and its learning rate for its own.
    if saved["optimizers"] != now["optimizers"]:
        found.append(f"the optimizers were {saved.get('optimizers')}, they are {now['optimizers']} now")
    length = saved["dataset_length"]
    if length != now["dataset_length"]:
        found.append(f"the dataset had {_count(length)}, it has {_count(now['dataset_length'])} now")
    if inside_epoch:
        before, after = saved["order"], now["order"]
        remedy = {"batch_size": "; where devices divide it, per_device_batch_size={} keeps it"}
        found += [
            f"{name} was {before.get(name)!r}, it is {after.get(name)!r} now: inside an epoch it must stay"
            f"{remedy.get(name, '').format(before.get(name))}"
            for name in [*before, *(name for name in after if name not in before)]
            if before.get(name) != after.get(name)
        ]
    return found


def orders(source: Source, position: Position) -> dict[int, int]:
    """Checksums of a sampler's draws, or of a stream's batches, by epoch, for epochs that are partly trained.

    Empty where the order is flowdp's own, which the fingerprint tells. The source has dealt the trained
    batches, or was asked for them.

    Threads:
        Any.
    """
    begun = [one for one in position.open if one.position > len(one.missing)]
    found = {one.epoch: source.checksum(one.epoch, one.position) for one in begun}
    return {epoch: checksum for epoch, checksum in found.items() if checksum is not None}


def _count(length: object) -> str:
    return "no length" if length is None else f"{length} samples"
