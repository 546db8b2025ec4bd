"""Ranks on fake CUDA lanes that train and average, in threads and through a real gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective.base import Averaging, Collective, Reading
from flowdp.collective.host import HostMean
from flowdp.collective.local import DeviceMean
from flowdp.collective.mean import BlockMean
from flowdp.collective.nccl import NcclMean
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import HostLane, Lane, StreamLane
from flowdp.engine.nan_guard import note_nonfinite
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Arrival, Outcome
from flowdp.threads.gate import Gate
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda, FakeStream
from tests.limits import HANG_S

Make = Callable[["FakeWorld"], Collective]


class FakeLane(StreamLane):
    """A fake lane with watched pinned memory, which is plain memory."""

    def __init__(self, device: torch.device, cuda: FakeCuda) -> None:
        super().__init__(device, cuda)
        self.fake = cuda

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        self.fake.watch("pinned memory", tensor)
        return tensor


def model(seed: int) -> nn.Module:
    """Parameters in three dtypes, statistics, a mask of -inf, and counts in three dtypes."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(40, 30),
        nn.BatchNorm1d(30),
        nn.Linear(30, 20).to(torch.bfloat16),
        nn.Linear(20, 3).double(),
    )
    module[1].running_mean.normal_()
    module[1].running_var.uniform_(0.5, 2.0)
    module[1].num_batches_tracked.fill_(seed + 3)
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf] * 40))
    module.register_buffer("seen", torch.arange(9, dtype=torch.int16) * (-1) ** seed)
    module.register_buffer("flags", torch.arange(9) % (seed + 2) == 0)
    return module


def in_threads(ranks: Sequence[int], body: Callable[[int], Any]) -> list[Any]:
    """Run `body(rank)` in a thread per rank; results or errors, in the order of `ranks`."""
    seen: dict[int, Any] = {}

    def work(rank: int) -> None:
        try:
            seen[rank] = body(rank)
        except Exception as error:
            seen[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    return [seen[rank] for rank in ranks]


class FakeWorld:
    """Replicas on lanes of a `FakeCuda`, with all flat memories watched.

    Args:
        make: Makes the collective.
        cards: Card of each rank; -1 is a CPU rank.
    """

    def __init__(self, make: Make, cards: Sequence[int] = (0, 0)) -> None:
        self.cuda = FakeCuda()
        self.lanes: list[Lane] = [
            HostLane(torch.device("cpu")) if card < 0 else FakeLane(torch.device("cuda", card), self.cuda)
            for card in cards
        ]
        self.modules = [model(rank) for rank in range(len(cards))]
        self.replicas = [FlatReplica(module, rank) for rank, module in enumerate(self.modules)]
        self.gate = Gate(len(cards), lambda outcome: self.mean.launch(outcome))
        self.mean = make(self)
        for rank, replica in enumerate(self.replicas):
            self.cuda.watch(f"rank {rank}", *replica.memories)
        self.flags = [torch.zeros((), dtype=torch.bool) for _ in cards]
        self.cuda.watch("a verdict", *self.flags)
        self.round = 0
        self.outcomes: list[Outcome] = []

    def train(self, rank: int) -> None:
        """A step on the current compute stream."""
        for memory in self.replicas[rank].memories:
            if memory.dtype.is_floating_point:
                memory.mul_(1.0 + rank / 64)

    def judge(self, rank: int, is_bad: bool) -> Tensor:
        """Give a replica NaN parameters, or not, and check it on its device."""
        if is_bad:
            for flat in self.replicas[rank].flats:
                if not flat.counts:
                    flat.memory.fill_(torch.nan)
        flag = self.flags[rank]
        note_nonfinite(self.replicas[rank].trained(), None, flag)
        return flag

    def hold(
        self,
        samples: Sequence[int],
        *,
        drift: bool = False,
        ranks: Sequence[int] | None = None,
        steps: int = 0,
        bad: Sequence[int] | None = None,
        delay: Callable[[int], object] = lambda rank: None,
    ) -> list[Reading]:
        """A round of all ranks after some steps; returns functions that read the results.

        Args:
            samples: Samples of each rank.
            drift: Whether to measure it.
            ranks: Ranks that take part.
            steps: Steps before and after it.
            bad: Ranks with NaN parameters, known only to their devices; None: not checked.
            delay: Called by each rank before it enters the gate.
        """

        def body(rank: int) -> Reading:
            lane = self.lanes[rank]
            with lane.on(lane.compute):
                for _ in range(steps):
                    self.train(rank)
                if bad is None:
                    self.mean.prepare(rank)
                else:
                    self.mean.prepare(rank, partial(self.judge, rank, rank in bad))
                delay(rank)
                arrival = Arrival(rank, self.round, self.round, 1, samples[rank], drift=drift)
                outcome = self.gate.enter(arrival)
                self.outcomes.append(outcome)
                reading = self.mean.average(rank, outcome)
                for _ in range(steps):
                    self.train(rank)
                return reading

        readings = in_threads(range(len(self.lanes)) if ranks is None else ranks, body)
        self.round += 1
        return readings

    def read(self, readings: Sequence[Reading]) -> list[Averaging]:
        for reading in readings:
            if isinstance(reading, Exception):
                raise reading
        return [reading() for reading in readings]

    def states(self) -> list[dict[str, Tensor]]:
        return [{k: v.clone() for k, v in module.state_dict().items()} for module in self.modules]


# ---------------------------------------------------------------- collectives
def device_mean(world: FakeWorld, outer: OuterOptions | None = None) -> DeviceMean:
    return DeviceMean(world.replicas, world.lanes, outer)


def host_mean(world: FakeWorld, outer: OuterOptions | None = None) -> HostMean:
    return HostMean(world.replicas, world.lanes, lambda rank: world.gate.finish(rank), outer)


def nccl_mean(world: FakeWorld, outer: OuterOptions | None = None) -> NcclMean:
    return NcclMean(world.replicas, world.lanes, FakeNccl(world.cuda, world.lanes), outer)


WAYS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "one card": (device_mean, (0, 0, 0)),
    "two cards": (device_mean, (0, 1, 1)),
    "three cards": (device_mean, (0, 1, 2)),
    "host, last arrival": (host_mean, (0, 1, 1)),
    "host, all members": (host_mean, (0, 1, 1)),
    "host and CPU ranks": (host_mean, (0, -1, 1)),
    "host, on the CPU": (host_mean, (-1, -1, -1)),
    "nccl": (nccl_mean, (0, 1, 2)),
}
"""Makers of a mean of three ranks on streams, with their cards."""


# ---------------------------------------------------------------- removed edges


def book_on_host(monkeypatch: pytest.MonkeyPatch, world: FakeWorld) -> None:
    """Record a `BlockMean`'s work as the host's, not the current stream's."""
    real = BlockMean.reduce
    host = FakeStream(world.cuda, None, 0)
    host.name = "the host"

    def reduce(mean: BlockMean, samples: Sequence[int], **options: Any) -> Tensor | None:
        with world.cuda.stream(host):
            squares = real(mean, samples, **options)
        host.synchronize()  # all later work of the host comes after it
        return squares

    monkeypatch.setattr(BlockMean, "reduce", reduce)
