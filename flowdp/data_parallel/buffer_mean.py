"""The mean of the replicas' buffers, in the user's module."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowdp.collective.base import add_weighted
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.copies import carry

__all__ = ["average_buffers"]


@torch.no_grad()
def average_buffers(replicas: Replicas, samples: Sequence[int]) -> None:
    """Replace the buffers of the user's module by those of all ranks together.

    Float and complex buffers: the mean weighted by samples, in float64; integers and flags: the maximum.
    A rank with 0 samples gives nothing.

    Streams:
        The caller's current ones, which come after the ranks' work.
    """
    givers = [rank for rank, count in enumerate(samples) if count]
    if not givers or givers == [0]:
        return
    shares = [samples[rank] / sum(samples) for rank in givers]
    columns = zip(*(carry(replicas.buffers(rank), replicas.devices[0]) for rank in givers), strict=True)
    for own, column in zip(replicas.buffers(0), columns, strict=True):
        if own.is_floating_point() or own.is_complex():
            wide = torch.complex128 if own.is_complex() else torch.float64
            mean = column[0].to(wide, copy=True)
            add_weighted(mean, column[1:], shares)
            own.copy_(mean)
        else:
            own.copy_(torch.stack(column).amax(0))
