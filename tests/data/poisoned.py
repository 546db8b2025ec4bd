"""A feed that overwrites each batch after its step, to find steps that keep one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flowdp.data.prefetch import PrefetchFeed
from flowdp.device.trees import tensors_of


class PoisonedFeed(PrefetchFeed):
    """Writes NaN, or the largest integer, into each slot that becomes free.

    Attributes:
        count: Slots overwritten so far by all feeds.
    """

    count = 0

    def release(self) -> None:
        for slot in self._in_use:
            slot.free.record(self._lane.compute)
            with self._lane.on(self._lane.copy):
                self._lane.copy.wait_event(slot.free)
                poison(tensors_of(slot.batch))
            PoisonedFeed.count += 1
        super().release()


def poison(memory: Iterable[Tensor]) -> None:
    """Overwrite tensors with NaN, or the largest integer."""
    for tensor in memory:
        worst: Any = math.nan
        if not (tensor.is_floating_point() or tensor.is_complex()):
            worst = tensor.dtype is torch.bool or torch.iinfo(tensor.dtype).max
        tensor.fill_(worst)
