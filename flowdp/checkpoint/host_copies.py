"""Copies of a device's tensors in host memory, through pinned memory that is used again.

A copy to pinned memory goes on while the host does, but pinning is slow. So the tensors of a state lie one
behind the other in one block, which serves the next state again, and are moved from there to plain memory by
the thread that asks for the copies. What the block has no room for is copied at once, while the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowdp.device.copies import aligned, dense_strides
from flowdp.device.streams import QUIET, Lane

__all__ = ["LIMIT", "HostCopies", "PinnedBlocks"]

LIMIT = 1 << 30
"""Bytes of a state that are copied while the host goes on, at most."""


class PinnedBlocks:
    """The pinned blocks of a rank's device that no copy uses.

    Args:
        lane: Lane of the rank.
        limit: Bytes of a block, at most.

    Attributes:
        lane: As given.

    Threads:
        `take`: the rank's. `give_back`: any.
    """

    def __init__(self, lane: Lane, limit: int = LIMIT) -> None:
        self.lane = lane
        self._limit = limit
        self._unused: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """A block of so many bytes, or of the limit. Shape [bytes]."""
        wanted = min(nbytes, self._limit)
        if self._unused and len(block := self._unused.pop()) >= wanted:
            return block
        with QUIET:
            return self.lane.pinned((wanted,), torch.uint8)

    def give_back(self, block: Tensor) -> None:
        """Take a block back."""
        self._unused.append(block)


class HostCopies:
    """Copies of the tensors of one state. Made where they are copied; the rest is done by `wait`.

    Args:
        blocks: Pinned memory of the device.
        tensors: Dense tensors of the device.

    Attributes:
        tensors: The copies, in plain memory; they are there behind `wait`. Each has the strides of its tensor
            where these leave no gaps, and no storage but its own.

    Threads:
        The one that captures. Its host waits for the device where the block has no more room.

    Streams:
        On `compute`, which must be the current one.
    """

    def __init__(self, blocks: PinnedBlocks, tensors: Sequence[Tensor]) -> None:
        self._blocks = blocks
        self._block = blocks.take(sum(aligned(tensor.nbytes) for tensor in tensors))
        self._used = 0
        self._moves: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            self.tensors = [self._copy(tensor) for tensor in tensors]
        self._copied = blocks.lane.event()
        self._copied.record(blocks.lane.compute)

    def wait(self) -> None:
        """Wait for the device, and move what lies in pinned memory.

        Threads:
            Any, once.
        """
        self._copied.synchronize()
        for host, pinned in self._moves:
            host.copy_(pinned)
        self._moves.clear()
        self._blocks.give_back(self._block)

    def _copy(self, tensor: Tensor) -> Tensor:
        strides = dense_strides(tensor)
        host = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        tensor = tensor.resolve_conj().resolve_neg()
        start, stop = self._used, self._used + tensor.nbytes
        if stop > len(self._block):
            return host.copy_(tensor)
        self._used += aligned(tensor.nbytes)
        pinned = self._block[start:stop].view(tensor.dtype).as_strided(tensor.shape, strides)
        pinned.copy_(tensor if tensor.stride() == strides else tensor.clone(), non_blocking=True)
        self._moves.append((host, pinned))
        return host
