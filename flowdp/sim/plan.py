"""Predictions for devices of one machine or several: the production code on virtual time, without faults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flowdp.errors import OptionError
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.gate import GateState
from flowdp.machine.policies import ROUNDS
from flowdp.machine.worker import WorkerMachine
from flowdp.options import CadenceOptions, MachineOptions, Policy
from flowdp.policy.formats import format_duration
from flowdp.protocol.commands import RoundEnded
from flowdp.protocol.messages import Outcome
from flowdp.sim.machines import Links, MachinesWorld
from flowdp.sim.world import VirtualRank
from flowdp.validators import check_int, check_number, one_of

__all__ = ["Prediction", "simulate"]

BATCHES = 1000
"""Steps of an epoch for each machine, where none are given."""

ROWS = 32
"""Devices that a printed prediction has a row for."""


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
        idle_ms: Time without a step: waiting for others, averaging, no data left. Shape (world_size,).
        idle_shares: The same as a fraction of `wall_ms`. Shape (world_size,).
        machines: Number of devices of each machine; empty where there is one.
        machine_efficiency: Throughput against the sum of the machines alone, each averaging its own devices:
            the rest is the price of the link. 1 where there is one machine.
        machine_rounds: Averagings of all machines.
        mean_ms: Time of one averaging of all machines, beside that of each one's own devices.
        round_bytes: Bytes that a machine sends in one averaging of all machines; it receives as many.
        bytes_per_s: The same per second, on average over the run.
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
    idle_ms: tuple[float, ...]
    idle_shares: tuple[float, ...]
    machines: tuple[int, ...] = ()
    machine_efficiency: float = 1.0
    machine_rounds: int = 0
    mean_ms: float = 0.0
    round_bytes: float = 0.0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        lines = ["rank   ms/step   share    idle"]
        columns = zip(self.speeds[:ROWS], self.shares, self.idle_shares, strict=False)
        for rank, (ms, share, idle) in enumerate(columns):
            lines.append(f"{rank:>4} {ms:>9.4g} {100 * share:>5.1f} % {100 * idle:>5.1f} %")
        if len(self.speeds) > ROWS:
            lines.append(f"and {len(self.speeds) - ROWS:,} more")
        lines.append(
            f"{self.policy}: {self.steps_per_s:,.1f} steps/s, {self.samples_per_s:,.0f} samples/s, "
            f"{100 * self.efficiency:.1f} % of these devices, {self.speedup:.2f} x the fastest alone"
        )
        lines.append(
            f"{self.rounds:,} rounds in {format_duration(self.wall_ms)}, anchor {self.anchor}, "
            f"{self.sync_ms:g} ms each"
        )
        if self.machines:
            lines.append(
                f"{len(self.machines):,} machines: {100 * self.machine_efficiency:.1f} % of these alone, "
                f"{self.machine_rounds:,} averagings of all, {self.mean_ms:,.4g} ms and "
                f"{self.round_bytes / 1e6:,.4g} MB of each, {8e-6 * self.bytes_per_s:,.4g} Mbit/s"
            )
        return "\n".join(lines)


def simulate(
    speeds: Sequence[float],
    *,
    sync_ms: float = 0.0,
    policy: Policy = "cadence",
    cadence: CadenceOptions | None = None,
    batch_size: int | None = None,
    per_device_batch_size: int | None = None,
    batches: int | None = None,
    epochs: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    partition_ratios: Sequence[float] | None = None,
    machines: int | Sequence[int] = 1,
    machine_options: MachineOptions | None = None,
    link_mbit: float = 1000.0,
    link_ms: float = 0.5,
    model_mb: float = 100.0,
) -> Prediction:
    """Run the production decision code on a virtual mix of devices.

    ::

        print(simulate([12, 28], sync_ms=9))          # is it worth adding the 28 ms card?

        # Four machines of two devices each, on a link of 1 Gbit/s: are 50 rounds apart enough?
        print(simulate([12, 12], machines=4, machine_options=MachineOptions(rounds=50), model_mb=400))

    The averaging of M machines is a ring, in 2 (M - 1) parts one after the other: each machine sends and
    receives 2 (M - 1) / M times the model.

    Args:
        speeds: Milliseconds of one step of each device, data included, with its part of `batch_size`. Of
            several equal machines, those of one of them. Shape (world_size,).
        sync_ms: Time of one averaging.
        policy: Policy of the run.
        cadence: How often the replicas meet; None: the defaults.
        batch_size: Samples of one step of all devices together, as of the Trainer; None: the sum of theirs.
        per_device_batch_size: Samples of a step of one device; None: as `batch_size` says, or 32.
        batches: Steps of one device that an epoch's samples make; None: 1,000 for each machine. Give more
            where that is no more than a few averagings of all machines: the first and the last one weigh.
        epochs: Epochs of the run.
        noise: Relative spread of a step's time: 0.1 draws each from 90 to 110 %.
        seed: Seed of the noise.
        partition_ratios: Fixed shares, summing to 1; None: by speed. Shape (world_size,).
        machines: How many machines there are, with these devices each; or how many of `speeds` each has.
        machine_options: Rounds from one averaging of all machines to the next, and whether they train
            meanwhile; None: the defaults.
        link_mbit: Bandwidth of each machine's link, in each direction, in Mbit/s.
        link_ms: Longest time of a message between two machines.
        model_mb: Bytes that are averaged, in millions: of float32 parameters, 4 each.

    Raises:
        OptionError: An argument is out of its range.

    Source:
        Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    given, numbers = _devices(speeds, machines)
    _check(given, sync_ms, policy, noise, partition_ratios)
    options = machine_options or MachineOptions()
    links, round_bytes = _links(len(numbers), options, link_mbit, link_ms, model_mb)
    if links is not None and policy == "async":
        raise OptionError('policy="async" runs on one machine alone: choose "cadence" for several')
    batches = BATCHES * len(numbers) if batches is None else batches
    for name, count in (("batches", batches), ("epochs", epochs)):
        check_int(name, count)
    whole, each = _sizes(batch_size, per_device_batch_size, len(given))
    is_exact = ROUNDS[policy].shares == "samples"
    config = CoordinatorConfig(
        world_size=len(given),
        batches=-(-batches // len(given)) if is_exact else batches,
        epochs=epochs,
        policy=policy,
        cadence=cadence or CadenceOptions(),
        ratios=None if partition_ratios is None else tuple(partition_ratios),
        global_batch=GlobalBatch(whole, each * batches) if is_exact else None,
        machines=numbers if links is not None else (),
        inner_rounds=options.rounds if policy == "cadence" else 1,
        overlaps=options.overlap and policy == "cadence" and links is not None,
    )
    world = _CountingWorld(
        Coordinator(config),
        GateState(len(given)),
        [VirtualRank(WorkerMachine(rank), ms) for rank, ms in enumerate(given)],
        seed=seed,
        sync_ms=sync_ms,
        noise=noise,
        batch_size=each,
        links=links,
    )
    world.run()
    prediction = _prediction(world)
    if links is None:
        return prediction
    alone = 0.0
    for devices, times in Counter(_cut(given, numbers)).items():
        one = simulate(
            devices,
            sync_ms=sync_ms,
            policy=policy,
            cadence=cadence,
            per_device_batch_size=each,
            batches=max(len(devices), batches * len(devices) // len(given)),
            epochs=epochs,
            noise=noise,
            seed=seed,
        )
        alone += times * one.samples_per_s
    return replace(
        prediction,
        machine_efficiency=prediction.samples_per_s / alone,
        mean_ms=links.mean_ms,
        round_bytes=round_bytes,
        bytes_per_s=1e3 * round_bytes * prediction.machine_rounds / prediction.wall_ms,
    )


class _CountingWorld(MachinesWorld):
    """A world that counts the averagings of all machines."""

    machine_rounds = 0

    def meet(self, outcome: Outcome) -> None:
        self.machine_rounds += bool(self.parts) and not outcome.inner
        super().meet(outcome)


def _devices(
    speeds: Sequence[float], machines: int | Sequence[int]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Times of a step of all devices, and the number of devices of each machine."""
    given = tuple(float(ms) for ms in speeds)
    if isinstance(machines, int):
        check_int("machines", machines)
        return given * machines, (len(given),) * machines
    numbers = tuple(machines)
    for number in numbers:
        check_int("machines", number)
    if sum(numbers) != len(given):
        raise OptionError(
            f"machines={numbers} have {sum(numbers)} devices, and speeds has {len(given)}: give the number "
            "of devices of each machine, in the order of speeds"
        )
    return given, numbers


def _links(
    machines: int, options: MachineOptions, mbit: float, latency_ms: float, model_mb: float
) -> tuple[Links | None, float]:
    """Links of several machines, and the bytes that each sends in one averaging of all."""
    check_number("link_mbit", mbit, above=True)
    check_number("link_ms", latency_ms, above=False)
    check_number("model_mb", model_mb, above=False)
    if machines == 1:
        return None, 0.0
    parts = 2 * (machines - 1)
    whole = 1e6 * model_mb / (2 if options.payload == "bf16" else 1)
    sent = parts / machines * whole
    mean_ms = parts * latency_ms + sent * 8 / (1e3 * mbit)
    return Links((0.0,) + (latency_ms,) * (machines - 1), mean_ms), sent


def _cut(speeds: tuple[float, ...], numbers: Sequence[int]) -> list[tuple[float, ...]]:
    """Times of a step of each machine's devices."""
    ends = list(accumulate(numbers))
    return [speeds[end - number : end] for end, number in zip(ends, numbers, strict=True)]


def _prediction(world: _CountingWorld) -> Prediction:
    config, wall_ms = world.coordinator.config, world.clock.now_ms
    rounds = [record for record in world.records if isinstance(record, RoundEnded)]
    samples = [sum(record.samples[rank] for record in rounds) for rank in range(config.world_size)]
    samples_per_ms = sum(samples) / wall_ms
    speeds = tuple(rank.ms_per_step for rank in world.ranks)
    alone = [world.batch_size / ms for ms in speeds]
    idle_ms = tuple(wall_ms - rank.trained_ms for rank in world.ranks)
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
        idle_ms=idle_ms,
        idle_shares=tuple(ms / wall_ms for ms in idle_ms),
        machines=config.machines,
        machine_rounds=world.machine_rounds,
    )


def _sizes(whole: int | None, each: int | None, world_size: int) -> tuple[int, int]:
    """Samples of a step of all devices, and of one of them."""
    check_int("batch_size", whole, optional=True)
    check_int("per_device_batch_size", each, optional=True)
    if whole is None:
        each = 32 if each is None else each
        return each * world_size, each
    if each is not None:
        raise OptionError(
            f"batch_size={whole} is that of all devices together, and per_device_batch_size={each} says the "
            "same in another way: give one of them"
        )
    return whole, -(-whole // world_size)


def _check(
    speeds: tuple[float, ...], sync_ms: float, policy: Policy, noise: float, ratios: Sequence[float] | None
) -> None:
    one_of("policy", policy, Policy)
    if not speeds or not all(0.0 < ms < math.inf for ms in speeds):
        raise OptionError(
            f"speeds must be the milliseconds per step of at least one device, all positive, not {speeds}"
        )
    if not 0.0 <= sync_ms < math.inf:
        raise OptionError(f"sync_ms must be a time in milliseconds, at least 0, not {sync_ms!r}")
    if not 0.0 <= noise < 1.0:
        raise OptionError(f"noise must lie in 0..1, 1 excluded, not {noise!r}")
    if ratios is None:
        return
    if ROUNDS[policy].shares == "equal":
        raise OptionError(
            "partition_ratios need rounds of several steps; with policy='sync' all shares are equal"
        )
    if len(ratios) != len(speeds) or min(ratios) <= 0.0 or not math.isclose(sum(ratios), 1.0, abs_tol=1e-6):
        raise OptionError(
            f"partition_ratios must be {len(speeds)} positive numbers that sum to 1, not {tuple(ratios)}"
        )
