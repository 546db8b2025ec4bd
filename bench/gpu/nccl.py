"""NCCL: one rank, and several ranks on one card, which NCCL allows since 2.30 as an experiment.

Several ranks may hang, or fail for lack of room on the card's multiprocessors, without an error of ours. So
they come last, each number of ranks in its own process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.averaging import against_copies, open_replicas
from bench.gpu.checks import deviation, faults_of
from bench.gpu.part import Figure, Finding, Note, Place, Skipped, timed_ms
from bench.harness import step_ms
from flowdp.collective.communicators import CommunicatorSetup, abort_all
from flowdp.collective.nccl import NcclMean, load
from flowdp.collective.nccl_sums import Side, launch_group, sum_replicas
from flowdp.device.streams import QUIET
from flowdp.options import RuntimeOptions

SHARED_SINCE = 23000
"""First version of NCCL that lets ranks share a card, as `get_version` has it."""


def measure_one(place: Place) -> Iterator[Finding]:
    """Create a communicator of one rank, check and time its means, and destroy it; abort another one."""
    place.needs_cuda("NCCL")
    nccl = load()
    yield Note(f"NCCL {nccl.get_version()}, torch built for {'.'.join(map(str, torch.cuda.nccl.version()))}")
    (replica,), lanes = open_replicas(place, 1, place.pick(100_000_000, 120_000))
    before = replica.memories[0].double().sum().item()
    with QUIET:
        side = Side(nccl, lanes[0], replica.flats)
    comms = CommunicatorSetup(nccl, lanes, [replica.flats]).wait()
    launch = partial(launch_group, nccl, comms)
    mean = partial(sum_replicas, launch, [side], (3,), drift=False)
    own = partial(launch, [side.calls])
    try:
        mean()
        others = [torch.empty_like(memory) for memory in replica.memories]

        def copy() -> None:
            for memory, other in zip(replica.memories, others, strict=True):
                other.copy_(memory)

        with lanes[0].on(lanes[0].comm):
            lanes[0].comm.synchronize()
            ms = timed_ms(place, mean, repeats=20)
            yield Figure("NCCL, 1 rank x 100 M, ms", ms)
            copy_ms = timed_ms(place, copy, repeats=20)
            own_ms = timed_ms(place, own, repeats=20)
            yield Figure("NCCL, 1 rank, equal samples: mean / copy of the replica", ms / copy_ms)
            yield Figure("NCCL, 1 rank, equal samples: NCCL alone / copy of the replica", own_ms / copy_ms)
            yield Figure("NCCL, 1 rank, launch, host, us", 1e3 * step_ms(mean, steps=20))
        lanes[0].drain()
        after = replica.memories[0].double().sum().item()
        if abs(after - before) > 1e-4 * replica.memories[0].numel() ** 0.5:
            raise RuntimeError(f"a mean of one rank changed its sum from {before} to {after}")
    finally:
        for comm in comms:
            comm.destroy()
    comms = CommunicatorSetup(nccl, lanes, [replica.flats]).wait()
    abort_all(comms)
    yield Note("one rank: communicators made twice, destroyed once, aborted once")


def measure_several(ranks: int, place: Place) -> Iterator[Finding]:
    """Several ranks on one card: error of means, training with delayed streams, a rank leaving, bandwidth."""
    place.needs_cuda("NCCL")
    if (version := load().get_version()) < SHARED_SINCE:
        raise Skipped(f"several ranks on one card need NCCL 2.30 or later, this one is {version}")
    devices = [place.device] * ranks
    away = deviation(devices, NcclMean)
    yield Figure(f"NCCL, {ranks} ranks on one card: away from float64, millionths", away * 1e6)
    if not away < 1e-6:
        raise RuntimeError(f"the means of {ranks} ranks differ from float64 by {away}")
    for policy, stall in (("sync", None), ("cadence", "backward"), ("cadence", "averaging")):
        # Batches are copied, the last of an epoch is short, and so memory is allocated beside the launches.
        if found := faults_of(
            devices, policy=policy, runtime=RuntimeOptions(backend="nccl"), stall=stall, is_streamed=True
        ):
            raise RuntimeError(f"{policy}, delays in {stall}: {'; '.join(found[:5])}")
        yield Note(f"NCCL, {ranks} ranks on one card: {policy}, delays in {stall or 'nothing'}: passed")
    away = deviation(devices, NcclMean, leaves=True)
    if not away < 1e-6:
        raise RuntimeError(f"the means of {ranks} ranks without one that left differ from float64 by {away}")
    if found := faults_of(
        devices, policy="cadence", runtime=RuntimeOptions(backend="nccl"), stall="averaging", leaver=1
    ):
        raise RuntimeError(f"one of {ranks} ranks leaves: {'; '.join(found[:5])}")
    yield Note(f"NCCL, {ranks} ranks on one card: one leaves, the others continue: passed")
    for equal in (False, True):
        yield from against_copies(place, "NCCL", NcclMean, ranks, place.pick(5, 1), equal=equal)
