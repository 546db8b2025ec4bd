"""Copies of a device's tensors in host memory, through pinned memory in pieces of one size.

A copy to pinned memory goes on while the host does, but pinning is slow, and torch rounds each allocation up
to a power of two and keeps it. So the tensors of a state lie one behind the other in pieces, which are used
again for the next state, and are moved from there to plain memory by the thread that asks for the copies. Of
a state that is larger than all pieces together, the thread that copies moves the oldest ones meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdp.device.copies import aligned, dense_strides
from flowdp.device.streams import QUIET, Event, Lane

__all__ = ["PIECES", "PIECE_BYTES", "HostCopies", "PinnedPieces"]

PIECE_BYTES = 64 << 20

PIECES = 16
"""Pieces that the copies of one state may fill before the copying thread waits for the device: 1 GiB."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of pinned memory.

    Attributes:
        memory: Its bytes. Shape [bytes].
        copied: Recorded behind the last copy into it.
        moves: Places that its contents go to, with the contents.
        used: Bytes in use, a multiple of 64.
    """

    memory: Tensor
    copied: Event
    moves: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    used: int = 0

    @property
    def room(self) -> int:
        """Bytes left, a multiple of 64."""
        return len(self.memory) - self.used

    def empty(self) -> None:
        """Wait for the copies, and move the contents to their places."""
        self.copied.synchronize()
        for place, contents in self.moves:
            place.copy_(contents)
        self.moves.clear()
        self.used = 0


class PinnedPieces:
    """The pieces of a rank's device that no copy uses.

    Args:
        lane: Lane of the rank.
        size: Bytes of a piece, at most.
        limit: Pieces that the copies of one state may fill.

    Attributes:
        lane: As given.
        size: As given.
        limit: As given.

    Threads:
        Any.
    """

    def __init__(self, lane: Lane, size: int = PIECE_BYTES, limit: int = PIECES) -> None:
        self.lane = lane
        self.size = size
        self.limit = limit
        self._lock = threading.Lock()
        self._unused: list[_Piece] = []

    def take(self, wanted: int) -> _Piece:
        """An empty piece; a new one where all are in use, smaller where so few bytes are wanted."""
        with self._lock:
            if self._unused:
                return self._unused.pop()
        size = min(self.size, 1 << (max(wanted, 64) - 1).bit_length())
        with QUIET:
            memory = self.lane.pinned((size,), torch.uint8)
        return _Piece(memory, self.lane.event())

    def give_back(self, piece: _Piece) -> None:
        """Take an empty piece back."""
        with self._lock:
            self._unused.append(piece)


class HostCopies:
    """Copies of the tensors of one state. Made where they are copied; the rest is done by `wait`.

    Args:
        pieces: Pieces of the device.
        tensors: Dense tensors of the device.

    Attributes:
        tensors: The copies, in plain memory; they are there behind `wait`. Each has the strides of its tensor
            where these leave no gaps, and no storage but its own.

    Threads:
        The one that captures. Its host waits for the device where the limit of pieces is reached.

    Streams:
        On `compute`, which must be the current one.
    """

    def __init__(self, pieces: PinnedPieces, tensors: Sequence[Tensor]) -> None:
        self._pieces = pieces
        self._left = sum(aligned(tensor.nbytes) for tensor in tensors)
        self._filled: deque[_Piece] = deque()
        with torch.no_grad():
            self.tensors = [self._copy(tensor) for tensor in tensors]
        self._mark()

    def wait(self) -> None:
        """Wait for the device, and move what is still in pieces.

        Threads:
            Any, once.
        """
        while self._filled:
            piece = self._filled.popleft()
            piece.empty()
            self._pieces.give_back(piece)

    def _copy(self, tensor: Tensor) -> Tensor:
        strides = dense_strides(tensor)
        host = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.stride() != strides:  # with gaps
            tensor = tensor.clone()
        source, place = (one.as_strided((one.numel(),), (1,)) for one in (tensor, host))
        start = 0
        while start < len(source):
            piece = self._open()
            stop = min(start + piece.room // tensor.itemsize, len(source))
            nbytes = (stop - start) * tensor.itemsize
            contents = piece.memory[piece.used : piece.used + nbytes].view(tensor.dtype)
            contents.copy_(source[start:stop], non_blocking=True)
            piece.moves.append((place[start:stop], contents))
            piece.used += aligned(nbytes)
            self._left -= aligned(nbytes)
            start = stop
        return host

    def _open(self) -> _Piece:
        """The piece that has room."""
        if self._filled and self._filled[-1].room:
            return self._filled[-1]
        self._mark()
        if len(self._filled) < self._pieces.limit:
            self._filled.append(self._pieces.take(self._left))
        else:
            oldest = self._filled.popleft()
            oldest.empty()
            self._filled.append(oldest)
        return self._filled[-1]

    def _mark(self) -> None:
        """Mark the end of the copies into the last piece."""
        if self._filled:
            self._filled[-1].copied.record(self._pieces.lane.compute)
