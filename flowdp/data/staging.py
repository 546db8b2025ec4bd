"""Batches of any form on their way to a device, through pinned memory that is used again.

A copy from plain memory holds the host up, and pinning each batch would be slower still. So a batch is
written into one of a few pinned buffers, in turn, and copied from there while the next one is read. Each
grows to the largest batch that it has held. On the device every tensor gets memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowdp.data.slots import HOST_SLOTS, is_plain, own_memory
from flowdp.device.copies import aligned, dense_strides
from flowdp.device.streams import QUIET, Event, Lane

__all__ = ["Staging"]


@dataclass(slots=True, eq=False)
class _Buffer:
    """A pinned buffer.

    Attributes:
        memory: Its bytes. Shape [bytes].
        copied: Recorded on `copy` behind the copies out of it.
        kept: Tensors that were pinned already, which are copied from where they are.
    """

    memory: Tensor
    copied: Event
    kept: list[Tensor] = field(default_factory=list)


class Staging:
    """Brings batches to a rank's device.

    Args:
        lane: Lane of the rank.

    Threads:
        One, for all batches.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._buffers: deque[_Buffer] = deque()

    def bring(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a batch on the device, each in memory of its own; what does not move is as it was.

        Streams:
            `copy` is current: it allocates there, and copies. The host waits for the copies of the third
            last batch.
        """
        plain = [leaf for leaf in leaves if is_plain(leaf) and not leaf.requires_grad and leaf.numel() > 0]
        if not plain:
            return [own_memory(leaf, self._lane) for leaf in leaves]
        pinned = [leaf for leaf in plain if leaf.is_pinned()]
        staged = {id(leaf) for leaf in plain} - {id(leaf) for leaf in pinned}
        buffer = self._next(sum(aligned(leaf.nbytes) for leaf in plain if id(leaf) in staged))
        buffer.kept = pinned
        moved, used = [], 0
        for leaf in leaves:
            if id(leaf) in staged:
                strides = dense_strides(leaf)
                part = (
                    buffer.memory[used : used + leaf.nbytes].view(leaf.dtype).as_strided(leaf.shape, strides)
                )
                used += aligned(leaf.nbytes)
                leaf = part.copy_(leaf)
            moved.append(own_memory(leaf, self._lane))
        buffer.copied.record(self._lane.copy)
        return moved

    def clear(self) -> None:
        """Let the memory go."""
        self._buffers.clear()

    def _next(self, nbytes: int) -> _Buffer:
        """A buffer of so many bytes that no copy reads any more."""
        if len(self._buffers) < HOST_SLOTS:
            buffer = _Buffer(self._pinned(nbytes), self._lane.event())
        else:
            buffer = self._buffers.popleft()
            buffer.copied.synchronize()
            if len(buffer.memory) < nbytes:
                buffer.memory = self._pinned(nbytes)
        self._buffers.append(buffer)
        return buffer

    def _pinned(self, nbytes: int) -> Tensor:
        with QUIET:
            if not nbytes:
                return torch.empty(0, dtype=torch.uint8, device="cpu")
            # Torch would round it up to a power of two, too.
            return self._lane.pinned((1 << (nbytes - 1).bit_length(),), torch.uint8)
