"""Means of replicas taken by hand, on an emulated machine.

A run waits for verdicts and reports between its means, and so hides some edges of a collective from all that
a run can show. Here the host waits for nothing but what the collective itself waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from bench.gpu.averaging import outcome_of
from flowdp.collective import mean as mean_module
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.base import Collective, Reading
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.nccl import NcclMean
from flowdp.collective.nccl_loop import NcclLoop
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import StreamLane
from flowdp.protocol.messages import Outcome
from tests.late.device import LateCuda
from tests.late.doors import Door

__all__ = ["MEANS"]

SIZE = 128  # fills the flat memory: there are no gaps

Make = Callable[[Sequence[FlatReplica], Sequence[StreamLane]], Collective]


def opened(devices: Sequence[int]) -> tuple[list[FlatReplica], list[StreamLane]]:
    """Replicas of zeros, one per device, and their lanes."""
    lanes = [StreamLane(torch.device("cuda", index)) for index in devices]
    replicas = []
    for rank, lane in enumerate(lanes):
        with lane.on(lane.compute):
            row = torch.zeros(SIZE, dtype=torch.float64, device=lane.device)
            replicas.append(FlatReplica(nn.ParameterList([row]), rank))
        lane.drain()
    return replicas, lanes


def add(replica: FlatReplica, lane: StreamLane, number: float) -> None:
    """A step: some work on `compute` that ends with this number added."""
    with lane.on(lane.compute):
        for _ in range(4):
            replica.memories[0].add_(number / 4)


def wrong(
    replicas: Sequence[FlatReplica], lanes: Sequence[StreamLane], expected: Sequence[float]
) -> list[str]:
    """Ranks whose numbers are not these."""
    for lane in lanes:
        lane.drain()
    found = [replica.memories[0].cpu() for replica in replicas]
    return [
        f"rank {rank} has {float(row[0])}, not {number}"
        for rank, (row, number) in enumerate(zip(found, expected, strict=True))
        if not torch.allclose(row, torch.full_like(row, number))
    ]


def rounds(make: Make, devices: Sequence[int]) -> Door:
    """Rounds of a blocking collective, each of which is read when the next step is on its way."""

    def work(_cuda: LateCuda) -> list[str]:
        replicas, lanes = opened(devices)
        collective = make(replicas, lanes)
        found, mean, reading = [], 0.0, None
        for number in range(4):
            for rank, (replica, lane) in enumerate(zip(replicas, lanes, strict=True)):
                add(replica, lane, 1.0 + 2 * rank + number)
            if reading is not None and (norm := reading().norm) != pytest.approx(mean * SIZE**0.5):
                found.append(f"the norm of round {number - 1} is {norm}")
            reading = averaged(collective, lanes, outcome_of(number, [1] * len(lanes), drift=True))
            mean += sum(1.0 + 2 * rank + number for rank in range(len(lanes))) / len(lanes)
        found += wrong(replicas, lanes, [mean] * len(lanes))
        collective.close()
        return found

    return Door(f"rounds of {make.__name__} on {devices}", work)


def in_blocks(_cuda: LateCuda) -> list[str]:
    """A mean between cards of several blocks: one comes in and one goes out while another is summed."""
    replicas, lanes = opened((0, 1))
    collective = DeviceMean(replicas, lanes)
    slope = torch.arange(SIZE, dtype=torch.float64)
    for replica, lane in zip(replicas, lanes, strict=True):
        with lane.on(lane.compute):
            replica.memories[0].add_(slope.to(lane.device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mean_module, "FAR_BLOCK", 16)
        for number in range(2):
            for rank, (replica, lane) in enumerate(zip(replicas, lanes, strict=True)):
                add(replica, lane, 1.0 + 2 * rank)
            averaged(collective, lanes, outcome_of(number, [1] * len(lanes)))
    for replica, lane in zip(replicas, lanes, strict=True):
        with lane.on(lane.compute):
            replica.memories[0].sub_(slope.to(lane.device))
    found = wrong(replicas, lanes, [4.0, 4.0])
    collective.close()
    return found


def averaged(collective: Collective, lanes: Sequence[StreamLane], outcome: Outcome) -> Reading:
    """Take a mean from one thread, in the order of the gate; returns what rank 0 may read of it."""
    for rank, lane in enumerate(lanes):
        with lane.on(lane.compute):
            collective.prepare(rank)
    collective.launch(outcome)
    readings = []
    for rank, lane in enumerate(lanes):
        with lane.on(lane.compute):
            readings.append(collective.average(rank, outcome))
    return readings[0]


def in_host(replicas: Sequence[FlatReplica], lanes: Sequence[StreamLane]) -> Collective:
    """The mean in the host's memory; replicas this small need no second meeting."""
    return HostMean(replicas, lanes, lambda rank: None)


def snapshots(devices: Sequence[int]) -> Door:
    """Means of snapshots; in the second round only the first rank has one."""

    def work(_cuda: LateCuda) -> list[str]:
        replicas, lanes = opened(devices)
        mean = SnapshotMean(replicas, lanes)
        expected = [0.0] * len(lanes)
        for number, members in enumerate([(0, 1), (0,), (0, 1)]):
            for rank in members:
                add(replicas[rank], lanes[rank], 1.0 + 2 * rank)
                expected[rank] += 1.0 + 2 * rank
                with lanes[rank].on(lanes[rank].compute):
                    mean.take(rank, number)
            snapshot = list(expected)
            mean.average(number, [int(rank in members) for rank in range(len(lanes))])
            for rank in members:
                add(replicas[rank], lanes[rank], 5.0)
                with lanes[rank].on(lanes[rank].compute):
                    mean.apply(rank, number, steps=1)
                expected[rank] += 5.0 + sum(snapshot[one] for one in members) / len(members) - snapshot[rank]
        return wrong(replicas, lanes, expected)

    return Door(f"snapshots on {devices}", work)


def sums_of_nccl(cuda: LateCuda) -> list[str]:
    """Sums of a user's loop over NCCL, whose rows come and go."""
    lanes = [StreamLane(torch.device("cuda", index)) for index in range(2)]
    loop = NcclLoop(lanes, {torch.float64: SIZE})
    results: list[Tensor] = []
    for number in range(3):
        rows = []
        for rank, lane in enumerate(lanes):
            with lane.on(lane.compute):
                rows.append([torch.zeros(SIZE, dtype=torch.float64, device=lane.device) + rank + number])
            cuda.current_stream(lane.device).wait_stream(lane.compute)  # type: ignore[arg-type]
        loop.all_reduce(rows)
        results.append(rows[0][0] + 0)
        for lane in lanes:  # the ranks' next work does not begin before the user's
            lane.await_caller()
        del rows
    found = [
        f"sum {number} is {row[0]}"
        for number, row in enumerate(map(Tensor.tolist, results))
        if row[0] != 2 * number + 1
    ]
    loop.close()
    return found


def freed_rows_of_nccl(cuda: LateCuda) -> list[str]:
    """Rows of a rank's thread that are let go when they are summed."""
    lanes = [StreamLane(torch.device("cuda", index)) for index in range(2)]
    loop = NcclLoop(lanes, {torch.float64: SIZE})
    for _ in range(3):
        rows = []
        for lane in lanes:
            with lane.on(lane.compute):
                rows.append([torch.ones(SIZE, dtype=torch.float64, device=lane.device)])
            cuda.current_stream(lane.device).wait_stream(lane.compute)  # type: ignore[arg-type]
        loop.all_reduce(rows)
        del rows
    loop.close()
    return []


MEANS = [
    rounds(DeviceMean, (0, 0)),
    rounds(DeviceMean, (0, 1)),
    Door("blocks between cards", in_blocks),
    rounds(NcclMean, (0, 1)),
    rounds(in_host, (0, 1)),
    snapshots((0, 0)),
    snapshots((0, 1)),
    Door("sums of NCCL", sums_of_nccl),
    Door("freed rows of NCCL", freed_rows_of_nccl),
]
