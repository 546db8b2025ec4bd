"""Cost of averaging replicas on one card, against a plain copy of the same bytes.

The useful bytes are those of every replica, read once and written once. Copying every replica to other memory
reads and writes as many, so the ratio of the two times is the fraction of the card's copy bandwidth that the
mean reaches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn

from bench.gpu.part import Figure, Finding, Note, Place, lanes_of, occupy, timed_ms
from bench.harness import compare
from flowdp.collective.base import Averaging, Collective
from flowdp.collective.fused import kernels_on
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import Lane
from flowdp.protocol.messages import Arrival, Outcome
from flowdp.threads.gate import Gate

TENSORS = 60  # as many as in a ResNet-18

Enter = Callable[[Gate, int], Outcome]
Make = Callable[[Sequence[FlatReplica], Sequence[Lane]], Collective]


def open_replicas(place: Place, ranks: int, parameters: int) -> tuple[list[FlatReplica], list[Lane]]:
    """Replicas with this number of float32 parameters on one device."""
    lanes = lanes_of([place.device] * ranks)
    replicas = []
    for rank, lane in enumerate(lanes):
        with lane.on(lane.compute):
            rows = [torch.randn(parameters // TENSORS, device=place.device) for _ in range(TENSORS)]
            replicas.append(FlatReplica(nn.ParameterList(rows), rank))
        lane.drain()
    return replicas, lanes


def outcome_of(
    round: int, samples: Sequence[int], *, drift: bool = False, left: Sequence[int] = ()
) -> Outcome:
    """The result of a round that all ranks but `left` took part in."""
    ranks = len(samples)
    members = tuple(rank for rank in range(ranks) if rank not in left)
    return Outcome(round, ranks * (round + 1), members, (1,) * ranks, tuple(samples), drift=drift)


def one_round(collective: Collective, lanes: Sequence[Lane], outcome: Outcome) -> Averaging:
    """Run a mean from one thread, in the order of the gate; for collectives without a second meeting."""
    members = [(rank, lanes[rank]) for rank in outcome.members]
    for rank, lane in members:
        with lane.on(lane.compute):
            collective.prepare(rank)
    collective.launch(outcome)
    readings = []
    for rank, lane in members:
        with lane.on(lane.compute):
            readings.append(collective.average(rank, outcome))
    return readings[0]()


def mean_ms(
    place: Place, collective: Collective, lanes: Sequence[Lane], rounds: int, drift: bool, equal: bool = False
) -> float:
    """Median time of a mean on the device, by CUDA events, begun behind other work."""
    samples = [3] * len(lanes) if equal else range(3, 3 + len(lanes))
    times = []
    for number in range(rounds + 2):
        for lane in lanes if place.is_cuda else ():
            with lane.on(lane.compute):
                occupy()
        times.append(one_round(collective, lanes, outcome_of(number, samples, drift=drift)).sync_ms)
    return median(times[2:])


def in_threads(lanes: Sequence[Lane], work: Callable[[int], None]) -> None:
    """Run a function in one thread per rank, on its compute stream, as a run does.

    Raises:
        RuntimeError: A rank failed.
    """
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            with lanes[rank].on(lanes[rank].compute):
                work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError(f"{len(errors)} ranks failed") from errors[0]


def host_ms(replicas: Sequence[FlatReplica], lanes: Sequence[Lane], rounds: int) -> float:
    """Median time of a mean through host memory, in one thread per rank."""
    samples = range(3, 3 + len(lanes))
    collective = HostMean(replicas, lanes, lambda rank: gate.finish(rank))
    gate = Gate(len(lanes), collective.launch)
    times: list[float] = []

    def work(rank: int) -> None:
        for number in range(rounds + 2):
            collective.prepare(rank)
            outcome = gate.enter(Arrival(rank, number, len(lanes) * number, 1, samples[rank]))
            reading = collective.average(rank, outcome)
            if rank == 0:
                times.append(reading().sync_ms)

    in_threads(lanes, work)
    return median(times[2:])


def against_copies(
    place: Place, name: str, make: Make, ranks: int, pairs: int, *, equal: bool = False
) -> Iterator[Finding]:
    """Measure a collective on replicas of 100 million float32 parameters, with and without the drift.

    The ranks' samples differ, or are `equal`.
    """
    parameters = place.pick(100_000_000, 120_000)
    replicas, lanes = open_replicas(place, ranks, parameters)
    memories = [memory for replica in replicas for memory in replica.memories]
    others = [torch.empty_like(memory) for memory in memories]

    def copy() -> None:
        for memory, other in zip(memories, others, strict=True):
            other.copy_(memory)

    copied = partial(timed_ms, place, copy, repeats=10)
    collective = make(replicas, lanes)
    rounds = place.pick(20, 5)
    try:
        label = f"{name}, {ranks} x {parameters / 1e6:g} M{', equal samples' if equal else ''}"
        for drift in (False, True):
            ours = partial(mean_ms, place, collective, lanes, rounds, drift, equal)
            result = compare(
                f"{label}{' with drift' if drift else ''}: fraction of copy bandwidth",
                {"copy": copied, "mean": ours},
                pairs=pairs,
            )
            yield result
            useful = 2 * sum(memory.nbytes for memory in memories)
            yield Figure(f"{label}{' with drift' if drift else ''}, GB/s", 1e-6 * useful / result.medians[1])
    finally:
        for lane in lanes:
            lane.drain()
        collective.close()


def measure(place: Place) -> Iterator[Finding]:
    pairs = place.pick(7, 1)
    has_kernels = kernels_on(place.device, 2) is not None
    yield Note(f"local: {'by kernels, in one pass' if has_kernels else 'by torch alone: no kernels here'}")
    for ranks in (2, 4):
        yield from against_copies(place, "local", DeviceMean, ranks, pairs)
        yield from against_copies(place, "local by torch", partial(DeviceMean, by_torch=True), ranks, pairs)
    replicas, lanes = open_replicas(place, 2, place.pick(100_000_000, 600_000))
    yield Figure("cpu backend, 2 replicas, ms", host_ms(replicas, lanes, place.pick(3, 3)))
