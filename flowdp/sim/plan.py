"""Predictions for a mix of devices: the production code on virtual time, without faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowdp.errors import OptionError
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.policies import ROUNDS
from flowdp.machine.worker import WorkerMachine
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.formats import format_duration
from flowdp.policy.shares import normalised_ratios
from flowdp.protocol.commands import RoundEnded
from flowdp.protocol.gate import GateState
from flowdp.sim.world import VirtualRank, World
from flowdp.validators import check_int, check_number, one_of

__all__ = ["Prediction", "simulate"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of `simulate`; prints as a table.

    Attributes:
        policy: Policy of the run.
        speeds: Milliseconds per step of each device alone. Shape (world_size,).
        wall_ms: Time of the whole run.
        steps_per_s: Steps per second: of all devices, in exact those that all take together.
        samples_per_s: Samples of all devices per second.
        efficiency: Throughput against the sum of the devices alone; averaging counts as lost.
        speedup: Throughput against the fastest device alone.
        anchor: Steps of the slowest device in a round, at the end.
        rounds: Averagings.
        sync_ms: Time of one averaging.
        shares: Fraction of the samples. Shape (world_size,).
        idle_shares: Fraction of `wall_ms` without a step: waiting for others, averaging, no data left. Shape
            (world_size,).
    """

    policy: Policy
    speeds: tuple[float, ...]
    wall_ms: float
    steps_per_s: float
    samples_per_s: float
    efficiency: float
    speedup: float
    anchor: int
    rounds: int
    sync_ms: float
    shares: tuple[float, ...]
    idle_shares: tuple[float, ...]

    def __str__(self) -> str:
        lines = ["rank   ms/step   share  waiting"]
        columns = zip(self.speeds, self.shares, self.idle_shares, strict=True)
        for rank, (ms, share, idle) in enumerate(columns):
            lines.append(f"{rank:>4} {ms:>9.4g} {100 * share:>5.1f} % {100 * idle:>6.1f} %")
        lines.append(
            f"{self.policy}: {self.steps_per_s:,.1f} steps/s, {self.samples_per_s:,.0f} samples/s, "
            f"{100 * self.efficiency:.1f} % of these devices, {self.speedup:.2f} x the fastest alone"
        )
        lines.append(
            f"{self.rounds:,} rounds of {self.anchor} steps of the slowest in "
            f"{format_duration(self.wall_ms)}, {self.sync_ms:g} ms of averaging each"
        )
        return "\n".join(lines)


def simulate(
    speeds: Sequence[float],
    *,
    sync_ms: float = 0.0,
    policy: Policy = "cadence",
    cadence: CadenceOptions | None = None,
    per_device_batch_size: int = 32,
    batches: int = 1000,
    epochs: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    partition_ratios: Sequence[float] | None = None,
) -> Prediction:
    """Run the production decision code on a virtual mix of devices.

    ::

        print(simulate([12, 28], sync_ms=9))          # is it worth adding the 28 ms card?

    Args:
        speeds: Milliseconds of one step of each device, data included, with its part of `batch_size`. Shape
            (world_size,).
        sync_ms: Time of one averaging.
        policy: Policy of the run.
        cadence: How often the replicas meet; None: the defaults.
        per_device_batch_size: Samples of a step of one device.
        batches: Steps of one device that an epoch's samples make.
        epochs: Epochs of the run.
        noise: Relative spread of a step's time: 0.1 draws each from 90 to 110 %.
        seed: Seed of the noise.
        partition_ratios: Fixed shares, summing to 1; None: by speed. Shape (world_size,).

    Raises:
        OptionError: An argument is out of its range.
    """
    given = tuple(float(ms) for ms in speeds)
    _check(given, policy, noise, partition_ratios)
    check_number("sync_ms", sync_ms, above=False)
    for name, count in (
        ("batches", batches),
        ("epochs", epochs),
        ("per_device_batch_size", per_device_batch_size),
    ):
        check_int(name, count)
    is_exact = ROUNDS[policy].shares == "samples"
    config = CoordinatorConfig(
        world_size=len(given),
        batches=-(-batches // len(given)) if is_exact else batches,
        epochs=epochs,
        policy=policy,
        cadence=cadence or CadenceOptions(),
        ratios=None if partition_ratios is None else normalised_ratios(partition_ratios, len(given)),
        global_batch=GlobalBatch(per_device_batch_size * len(given), per_device_batch_size * batches)
        if is_exact
        else None,
    )
    world = World(
        Coordinator(config),
        GateState(len(given)),
        [VirtualRank(WorkerMachine(rank), ms) for rank, ms in enumerate(given)],
        seed=seed,
        sync_ms=sync_ms,
        noise=noise,
        batch_size=per_device_batch_size,
    )
    world.run()
    return _prediction(world)


def _prediction(world: World) -> Prediction:
    config, wall_ms = world.coordinator.config, world.clock.now_ms
    rounds = [record for record in world.records if isinstance(record, RoundEnded)]
    samples = [sum(record.samples[rank] for record in rounds) for rank in range(config.world_size)]
    samples_per_ms = sum(samples) / wall_ms
    speeds = tuple(rank.ms_per_step for rank in world.ranks)
    alone = [world.batch_size / ms for ms in speeds]
    return Prediction(
        policy=config.policy,
        speeds=speeds,
        wall_ms=wall_ms,
        steps_per_s=1e3 * world.coordinator.global_step / wall_ms,
        samples_per_s=1e3 * samples_per_ms,
        efficiency=samples_per_ms / sum(alone),
        speedup=samples_per_ms / max(alone),
        anchor=world.coordinator.rounds.anchor,
        rounds=sum(record.rounds for record in rounds),
        sync_ms=world.sync_ms,
        shares=tuple(count / sum(samples) for count in samples),
        idle_shares=tuple(1.0 - rank.trained_ms / wall_ms for rank in world.ranks),
    )


def _check(speeds: tuple[float, ...], policy: Policy, noise: float, ratios: Sequence[float] | None) -> None:
    one_of("policy", policy, Policy)
    if not speeds or not all(0.0 < ms < math.inf for ms in speeds):
        raise OptionError(
            f"speeds must be the milliseconds per step of at least one device, all positive, not {speeds}"
        )
    if not 0.0 <= noise < 1.0:
        raise OptionError(f"noise must lie in 0..1, 1 excluded, not {noise!r}")
    if ratios is not None and ROUNDS[policy].shares == "equal":
        raise OptionError(
            "partition_ratios need rounds of several steps; under policy='sync' all shares are equal"
        )
