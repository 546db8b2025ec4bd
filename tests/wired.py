"""Replicas whose gradients and parameters travel over a fake NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flowdp.collective.nccl_loop import NcclLoop
from flowdp.data_parallel.replicas import Link, Replicas
from flowdp.device.streams import Lane, StreamLane
from tests.collective.fake_nccl import FakeNccl
from tests.fakes import FakeCuda
from tests.loops import CPU, replicas_of


def fake_link(seen: Callable[[FakeNccl], object] = lambda _: None) -> Link:
    """Opens a fake NCCL on lanes of a `FakeCuda`, and exposes it."""

    def link(lanes: Sequence[Lane], sizes: Mapping[torch.dtype, int]) -> NcclLoop:
        lane = lanes[0]
        assert isinstance(lane, StreamLane)
        nccl = FakeNccl(lane.device_module, lanes)
        loop = NcclLoop(lanes, sizes, nccl=nccl)
        nccl.kinds.clear()
        nccl.groups.clear()
        seen(nccl)
        return loop

    return link


@contextmanager
def wired(module: nn.Module, count: int = 2, **more: Any) -> Iterator[Replicas]:
    """Replicas on fake streams; at the end every access must have been ordered, and every launch quiet."""
    cuda = FakeCuda()
    made: list[FakeNccl] = []
    lanes = [StreamLane(CPU, cuda) for _ in range(count)]
    with (
        cuda.stream(cuda.default),
        replicas_of(module, count, lanes=lanes, link=fake_link(made.append), **more) as replicas,
    ):
        for rank, replica in enumerate(replicas.modules):
            cuda.watch(f"rank {rank}", *replica.parameters())
        replicas.nccl = made[0]  # type: ignore[attr-defined]
        yield replicas
    assert not cuda.races
    assert all(is_quiet for is_quiet, _ in made[0].groups)
    assert len(made[0].destroyed) == count
    assert not made[0].abused
