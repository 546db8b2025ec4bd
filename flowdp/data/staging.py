"""Batches of any form on their way to a device, through pinned memory that is used again.

A copy from plain memory holds the host up, and pinning each batch would be slower still. So a batch is
written into one of a few pinned buffers, in turn, and copied from there while the next one is read. Each
grows to the largest batch that it has held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowdp.data.slots import HOST_SLOTS, first_rows, is_plain, own_memory
from flowdp.data.tensor_source import TensorSource
from flowdp.device.copies import aligned, dense_strides
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.protocol.messages import SampleRange

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

    def bring(self, leaves: Sequence[Any], memory: Sequence[Tensor | None] = ()) -> list[Any]:
        """The leaves of a batch on the device; what does not move is as it was.

        Args:
            leaves: The leaves.
            memory: A place there for each, or for one that is longer; None: it gets memory of its own. Empty:
                all do.

        Streams:
            `copy` is current: it allocates there, and copies. The host waits for the copies of the third
            last batch.
        """
        homes = memory or [None] * len(leaves)
        plain = [
            leaf
            for leaf, home in zip(leaves, homes, strict=True)
            if is_plain(leaf) and leaf.numel() > 0 and (home is not None or not leaf.requires_grad)
        ]
        pinned = [leaf for leaf in plain if leaf.is_pinned()]
        staged = {id(leaf) for leaf in plain} - {id(leaf) for leaf in pinned}
        buffer, parts = self._lend([leaf for leaf in plain if id(leaf) in staged])
        buffer.kept = pinned
        part, moved = iter(parts), []
        for leaf, home in zip(leaves, homes, strict=True):
            if id(leaf) in staged:
                leaf = next(part).copy_(leaf)
            if home is None:
                moved.append(own_memory(leaf, self._lane))
            else:
                target = first_rows(len(leaf) if leaf.dim() else 0, home)
                moved.append(target.copy_(leaf, non_blocking=True))
        buffer.copied.record(self._lane.copy)
        return moved

    def gather(
        self, source: TensorSource, key: tuple[int, int, SampleRange | None], memory: Sequence[Tensor]
    ) -> None:
        """Gather a batch of tensors into memory of the device. Streams: as `bring`."""
        buffer, parts = self._lend(memory)
        source.gather(*key, out=parts)
        for target, part in zip(memory, parts, strict=True):
            target.copy_(part, non_blocking=True)
        buffer.copied.record(self._lane.copy)

    def _lend(self, likes: Sequence[Tensor]) -> tuple[_Buffer, list[Tensor]]:
        """A buffer that no copy reads any more, and parts of it, formed like these tensors."""
        buffer = self._next(sum(aligned(like.nbytes) for like in likes))
        parts, used = [], 0
        for like in likes:
            part = buffer.memory[used : used + like.nbytes].view(like.dtype)
            parts.append(part.as_strided(like.shape, dense_strides(like)))
            used += aligned(like.nbytes)
        return buffer, parts

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
