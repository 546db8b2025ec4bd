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
from flowdp.device.streams import QUIET, Event, Lane

__all__ = ["Staging"]

ALIGNMENT = 64


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
        staged = [is_plain(leaf) and not leaf.requires_grad and leaf.numel() > 0 for leaf in leaves]
        if not any(staged):
            return [own_memory(leaf, self._lane) for leaf in leaves]
        buffer = self._next(
            sum(_aligned(leaf.nbytes) for leaf, one in zip(leaves, staged, strict=True) if one)
        )
        moved, used = [], 0
        for leaf, is_staged in zip(leaves, staged, strict=True):
            if is_staged and leaf.is_pinned():
                buffer.kept.append(leaf)
            elif is_staged:
                strides = torch.empty_like(leaf, device="meta").stride()
                part = (
                    buffer.memory[used : used + leaf.nbytes].view(leaf.dtype).as_strided(leaf.shape, strides)
                )
                used += _aligned(leaf.nbytes)
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
            buffer.kept.clear()
            if len(buffer.memory) < nbytes:
                buffer.memory = self._pinned(nbytes)
        self._buffers.append(buffer)
        return buffer

    def _pinned(self, nbytes: int) -> Tensor:
        with QUIET:  # torch would round it up to a power of two, too
            return self._lane.pinned((1 << (nbytes - 1).bit_length(),), torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
