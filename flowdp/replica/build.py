"""One replica per device, of what the user gave: equal, and ready to train."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flowdp.collective.batch_norm import WindowGroups, check_sync_batch_norm, min_part_size, plain_layers
from flowdp.device.compiled import uses_compile, warn_of_draws
from flowdp.device.draws import share_generator
from flowdp.device.flat_gradients import Touched
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import Lane, open_lanes
from flowdp.errors import OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.modules.whole_batch import check_dense, check_embeddings
from flowdp.options import CaptureOptions, Policy, Precision
from flowdp.replica.batch_sizes import Sizes
from flowdp.replica.captured_steps import capture_steps
from flowdp.replica.custom_step import CustomStepReplica, TrainStep
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.factories import (
    ModelOption,
    OptimizerOption,
    Optimizers,
    all_of,
    build_models,
    build_optimizers,
    check_closure,
    equal_start,
    seed_devices,
    several_optimizers,
    slow_optimizer,
)
from flowdp.replica.flat_optimizer import group_keys, obstacle
from flowdp.replica.learning_rate import LearningRate
from flowdp.replica.replica import LossOption, Replica, loss_function

__all__ = ["Parts", "build_replicas"]

log = logging.getLogger("flowdp")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What replicas are made of; see `Trainer`.

    Attributes:
        model: A module or a factory.
        optimizer: An instance or a factory.
        loss: Of a step; None with a `train_step`.
        train_step: The user's own step; None with a loss.
        policy: Who waits for whom.
        sizes: Of batches and steps.
        seed: Of the devices' generators.
        precision: Of forward and loss.
        max_grad_norm: Of the gradients; None: not clipped.
        schedule: As `LearningRate` takes it, behind the optimizers.
        checks: Whether ranks check their loss now and then (exact).
        capture: How steps are captured; None: they are not.
        repeats: Whether CPU ranks draw by the seed, too: the shares are fixed, so all else repeats (exact).
    """

    model: ModelOption
    optimizer: OptimizerOption
    loss: LossOption | None
    train_step: TrainStep | None
    policy: Policy
    sizes: Sizes
    seed: int
    precision: Precision
    max_grad_norm: float | None
    schedule: tuple[Any, ...]
    capture: CaptureOptions | None = None
    repeats: bool = False
    checks: bool = False


def build_replicas(parts: Parts, devices: Sequence[torch.device]) -> list[Replica]:
    """Build one replica per device.

    Raises:
        OptionError: The factories' results cannot be used.

    Threads:
        The user's, where all factories are called.
    """
    lanes = open_lanes(devices)
    modules = build_models(parts.model, lanes)
    check_sync_batch_norm(modules, parts.policy, devices)
    averages = ROUNDS[parts.policy].averages
    if averages == "gradients":
        check_embeddings(modules[0], "policy='exact'", is_shared=len(devices) > 1)
    flats = equal_start(modules, lanes)
    if averages == "gradients" and min_part_size(plain_layers(modules[0])) > 1:
        log.warning(
            "policy='exact': BatchNorm takes its statistics from each micro-batch, not from the window of %d "
            "samples, so this run is not that of one device; with GroupNorm or LayerNorm it is, and "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) takes them from all devices",
            parts.sizes.window,
        )
    optimizers = [_optimizers(parts, *one) for one in zip(modules, lanes, strict=True)]
    if parts.train_step is None:
        _arrange(modules[0], flats, lanes, all_of(optimizers[0])[0])
    touched, groups = Touched(len(lanes)), WindowGroups(lanes)
    replicas = [
        _replica(parts, *one, touched, groups) for one in zip(modules, flats, lanes, optimizers, strict=True)
    ]
    for replica in replicas:
        replica.caches_casts = len(replicas) == 1
    seed_devices(devices, parts.seed)
    if parts.repeats:
        warn_of_draws(devices, uses_compile(modules[0], replicas[0].function))
    else:
        for replica, is_shared in zip(replicas, share_generator(devices), strict=True):
            replica.shares_generator = is_shared
    if parts.capture is not None:
        capture_steps(replicas, parts.capture)
    advice = None if replicas[0].steps_flat else slow_optimizer(all_of(replicas[0].optimizers)[0])
    if lanes[0].is_async and advice:
        log.info("%s", advice)
    return replicas


def _optimizers(parts: Parts, module: nn.Module, lane: Lane) -> Optimizers:
    source = parts.model if isinstance(parts.model, nn.Module) else None
    with lane.on(lane.compute):
        optimizers = build_optimizers(parts.optimizer, module, source)
    if parts.train_step is None and len(optimizers) > 1:
        raise OptionError(several_optimizers(len(optimizers)))
    if parts.train_step is None:
        check_closure(all_of(optimizers)[0])
    return optimizers


def _arrange(
    module: nn.Module, flats: Sequence[FlatReplica], lanes: Sequence[Lane], optimizer: Optimizer
) -> None:
    """Let each parameter group lie in one piece, where the optimizer steps flat memory.

    By the groups of the first rank: all replicas have one layout.
    """
    if len(optimizer.param_groups) == 1 or obstacle(optimizer, module, flats[0]) is not None:
        return
    keys = group_keys(optimizer, flats[0])
    for flat, lane in zip(flats, lanes, strict=True):
        with lane.on(lane.compute):
            flat.arrange(keys)


def _replica(
    parts: Parts,
    module: nn.Module,
    flat: FlatReplica,
    lane: Lane,
    optimizers: Optimizers,
    touched: Touched,
    groups: WindowGroups,
) -> Replica:
    with lane.on(lane.compute):
        rate = LearningRate(all_of(optimizers), *parts.schedule)
        width = parts.sizes.widths[flat.rank]
        rest = rate, lane, parts.precision, parts.max_grad_norm, width
        if parts.train_step is not None:
            return CustomStepReplica(parts.train_step, module, flat, optimizers, *rest)
        assert parts.loss is not None
        loss = loss_function(parts.loss, lane.device)
        if ROUNDS[parts.policy].averages == "gradients":
            check_dense(all_of(optimizers)[0])
            size = parts.sizes.parts[flat.rank]
            return ExactReplica(
                size,
                touched,
                groups,
                parts.seed if parts.repeats and lane.device.type == "cpu" else None,
                parts.checks,
                module,
                flat,
                optimizers,
                loss,
                *rest,
            )
        return Replica(module, flat, optimizers, loss, *rest)
