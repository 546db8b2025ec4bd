"""Equal replicas, one per device, built from the user's model, optimizer and loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Semaphore
from typing import Any

import torch
from torch import nn

from flowdp.collective.batch_norm import (
    PARTS_ALONE,
    RankGroups,
    SharedStatistics,
    check_sync_batch_norm,
    min_part_size,
    plain_layers,
)
from flowdp.device.compiled import uses_compile, warn_of_draws
from flowdp.device.draws import share_generator
from flowdp.device.streams import Lane, open_lanes
from flowdp.errors import OptionError
from flowdp.graphs.captured_step import Capture, capture_steps
from flowdp.machine.policies import ROUNDS
from flowdp.machine.rounds import Averages
from flowdp.network.team import Team
from flowdp.options import CaptureOptions, Policy, Precision
from flowdp.policy.schedule import lr_factor
from flowdp.replica.batch_sizes import Sizes
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
    check_hooks,
    equal_machines,
    equal_start,
    flatten,
    seed_devices,
    several_optimizers,
)
from flowdp.replica.learning_rate import LearningRate, SchedulerOptions
from flowdp.replica.loss import LossOption, loss_function
from flowdp.replica.parts import ReplicaParts
from flowdp.replica.replica import Replica
from flowdp.replica.window_replica import LoneReplica

__all__ = ["ReplicaConfig", "build_replicas"]

log = logging.getLogger("flowdp")

NOT_AVERAGED = (
    "Frozen parameters are not averaged, so each device would have its own: register it as a buffer, which "
    "is averaged; or take flowdp.EMA for a moving average of the weights; or policy='exact', and write to it "
    "in Callback.on_step; or one device"
)
ONE_MEMORY = (
    "The devices' models share its memory, so each would write over the others: give the model of each "
    "device a copy of its own"
)


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Settings of the replicas: arguments of a `Trainer`, checked, and what follows from others.

    Attributes:
        sizes: Sizes of batches and steps.
        capture: How steps are captured; None: they are not.
        is_capture_chosen: Whether they are in any case, not only where it makes them faster.
        ema_decay: Part of the weights' moving average that stays in a step; None: there is no average.
        repeats: CPU ranks draw by the seed, too: the shares are fixed, so all else repeats (exact).
        checks_loss: Ranks check their loss now and then (exact).
        launch_limit: Ranks of this machine that may be in their loss at once; None: all.
        is_resumed: The log of an earlier run has the warnings.
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
    scheduler: SchedulerOptions
    capture: CaptureOptions | None = None
    is_capture_chosen: bool = False
    max_grad_value: float | None = None
    ema_decay: float | None = None
    repeats: bool = False
    checks_loss: bool = False
    launch_limit: int | None = None
    is_resumed: bool = False


def build_replicas(
    config: ReplicaConfig, devices: Sequence[torch.device], team: Team | None = None
) -> list[Replica]:
    """Build one replica per device.

    Args:
        config: Settings of the replicas of all ranks.
        devices: Devices of this machine.
        team: The ranks of all machines, which begin with the weights of the first one; None: these are all.

    Raises:
        CollectiveError: A machine was lost.
        OptionError: The factories' results cannot be used, or those of another machine are others.

    Threads:
        The user's, where all factories are called.
    """
    team = Team((len(devices),)) if team is None else team
    world_size = team.world_size
    lanes = open_lanes(devices)
    modules = build_models(config.model, lanes)
    check_sync_batch_norm(modules[0], config.policy, devices)
    averages = ROUNDS[config.policy].averages
    equal_start(modules, lanes)
    if team.machines is not None:
        equal_machines(modules, lanes, team.machines)
    if averages == "gradients":
        _check_statistics(config, modules[0], team)
    optimizers = [_optimizers(config, *one) for one in zip(modules, lanes, strict=True)]
    is_cut = averages == "gradients" and not team.is_spread and all(lane.is_async for lane in lanes)
    flats = flatten(
        modules,
        lanes,
        all_of(optimizers[0])[0] if config.train_step is None else None,
        may_thaw=world_size == 1,
        spans=world_size if is_cut else 1,
    )
    if averages == "gradients" and world_size > 1:
        check_hooks(modules[0])  # now: an optimizer may have registered some, to step as gradients come
    functions = [_function(config, lane) for lane in lanes]
    shares = [False for _ in lanes] if config.repeats else share_generator(devices)
    captures: Sequence[Capture | None] = [None for _ in lanes]
    if config.capture is not None:
        captures = capture_steps(
            modules, functions, lanes, config.capture, is_chosen=config.is_capture_chosen
        )
    launching = None if config.launch_limit is None else Semaphore(config.launch_limit)
    factor = lr_factor(config.scheduler.lr_scaling, world_size)
    remedy = _frozen_remedy(modules, averages, world_size)
    groups = RankGroups(lanes)
    replicas = []
    for index, (rank, lane) in enumerate(zip(team.ranks, lanes, strict=True)):
        with lane.on(lane.compute):
            parts = ReplicaParts(
                module=modules[index],
                flat=flats[index],
                optimizers=optimizers[index],
                learning_rate=LearningRate(optimizers[index], config.scheduler, factor),
                lane=lane,
                precision=config.precision,
                max_grad_norm=config.max_grad_norm,
                max_grad_value=config.max_grad_value,
                ema_decay=config.ema_decay,
                frozen_remedy=remedy,
                width=config.sizes.widths[rank],
                caches_casts=world_size == 1,
                shares_generator=shares[index],
                launching=launching,
                capture=captures[index],
            )
            replicas.append(_replica(config, rank, parts, functions[index], groups))
    seed_devices(devices, config.seed, team.index)
    if config.repeats:
        warn_of_draws(devices, uses_compile(modules[0], functions[0]))
    return replicas


def _check_statistics(config: ReplicaConfig, module: nn.Module, team: Team) -> None:
    """Check where the BatchNorms of a model under "exact" take their statistics; the log says it.

    Raises:
        OptionError: They cannot take them from all devices.
    """
    if team.world_size > 1 and not config.is_resumed and min_part_size(plain_layers(module)) > 1:
        log.warning(PARTS_ALONE)
    if not SharedStatistics(module):
        return
    if team.is_spread:
        raise OptionError(
            "SyncBatchNorm takes statistics of the devices of one machine, and this run has "
            f"{len(team.sizes)} machines: use GroupNorm or LayerNorm, or plain BatchNorm, whose statistics "
            "are those of each micro-batch"
        )
    if config.launch_limit is not None:
        raise OptionError(
            "runtime.launch_limit lets ranks wait outside their loss, and SyncBatchNorm waits for all of "
            "them inside it: leave one of the two out"
        )


def _frozen_remedy(modules: Sequence[nn.Module], averages: Averages, world_size: int) -> str | None:
    """Remedy for writes to frozen parameters, for the error; None: they are allowed."""
    if world_size == 1:
        return None
    if averages != "gradients":
        return NOT_AVERAGED
    # Under exact all devices take every step, and may write alike.
    frozen = [
        {parameter.data_ptr() for parameter in module.parameters() if not parameter.requires_grad}
        for module in modules
    ]
    return ONE_MEMORY if any(one & frozen[0] - {0} for one in frozen[1:]) else None


def _optimizers(config: ReplicaConfig, module: nn.Module, lane: Lane) -> Optimizers:
    source = config.model if isinstance(config.model, nn.Module) else None
    with lane.on(lane.compute):
        optimizers = build_optimizers(config.optimizer, module, source)
    if config.train_step is None:
        if len(optimizers) > 1:
            raise OptionError(several_optimizers(len(optimizers)))
        check_closure(all_of(optimizers)[0])
    return optimizers


def _function(config: ReplicaConfig, lane: Lane) -> Callable[..., Any]:
    """The user's function that a step on this lane calls."""
    if config.train_step is not None:
        return config.train_step
    assert config.loss is not None
    with lane.on(lane.compute):
        return loss_function(config.loss, lane.device)


def _replica(
    config: ReplicaConfig,
    rank: int,
    parts: ReplicaParts,
    function: Callable[..., Any],
    groups: RankGroups,
) -> Replica:
    if config.train_step is not None:
        return CustomStepReplica(parts, config.train_step)
    if ROUNDS[config.policy].averages != "gradients":
        return Replica(parts, function)
    size, checks = config.sizes.parts[rank], config.checks_loss
    seed = config.seed if config.repeats else None
    if len(config.sizes.parts) == 1:
        return LoneReplica(parts, function, size=size, seed=seed, checks=checks)
    return ExactReplica(parts, function, size=size, groups=groups, seed=seed, checks=checks)
