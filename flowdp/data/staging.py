"""Batches of any form on their way to a device, through pinned memory that is used again.

A copy from plain memory holds the host up, and pinning each batch would be slower still. So a batch is
written into one of a few pinned buffers, in turn, and copied from there while the next one is read. Each
grows to the largest batch that it has held. `CopySpans` records the copies, on the clock of the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flowdp.data.moving import is_plain, own_memory
from flowdp.data.tensor_source import TensorSource
from flowdp.device.copies import aligned, dense_strides
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.policy.efficiency import Activity
from flowdp.protocol.messages import SampleRange
from flowdp.timeline.spans import RankSpans

__all__ = ["HOST_SLOTS", "CopySpans", "Staging"]

HOST_SLOTS = 3
"""Buffers of pinned memory: one is filled, one is copied, and with a third neither waits for the other."""


class Staging:
    """Brings batches to a rank's device.

    Args:
        lane: Lane of the rank.

    Threads:
        One, for all batches.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        # Bytes, the event behind the copies out of them, and tensors that are copied from where they are.
        self._buffers: deque[tuple[Tensor, Event, Sequence[Tensor]]] = deque()

    def bring(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a batch on the device; leaves that do not move are returned as they are.

        Streams:
            `copy` is current: it allocates there, and copies. The host waits for the copies of the third
            last batch.
        """
        plain = [leaf for leaf in leaves if is_plain(leaf) and leaf.numel() > 0 and not leaf.requires_grad]
        pinned = [leaf for leaf in plain if leaf.is_pinned()]
        staged = {id(leaf) for leaf in plain} - {id(leaf) for leaf in pinned}
        with self._lent([leaf for leaf in plain if id(leaf) in staged], pinned) as parts:
            part = iter(parts)
            return [
                own_memory(next(part).copy_(leaf) if id(leaf) in staged else leaf, self._lane)
                for leaf in leaves
            ]

    def gather(
        self, source: TensorSource, epoch: int, batch: int, part: SampleRange | None = None
    ) -> list[Tensor]:
        """A batch of tensors on the device, gathered in pinned memory. Streams: as `bring`."""
        samples = source.samples_in(epoch, batch) if part is None else part.samples
        likes = [
            torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
            for tensor in source.tensors
        ]
        with self._lent(likes) as parts:
            source.gather(epoch, batch, part, out=parts)
            return [own_memory(rows, self._lane) for rows in parts]

    @contextmanager
    def _lent(self, likes: Sequence[Tensor], pinned: Sequence[Tensor] = ()) -> Iterator[list[Tensor]]:
        """Context in which pinned memory is filled, and copies out of it are enqueued; yields its parts.

        Args:
            likes: A part is made for each, and formed like it.
            pinned: Tensors that are copied from where they are, and kept until those copies are over.
        """
        if len(self._buffers) == HOST_SLOTS:
            memory, copied, _ = self._buffers.popleft()
            copied.synchronize()
        else:
            with QUIET:
                memory, copied = torch.empty(0, dtype=torch.uint8, device="cpu"), self._lane.event()
        nbytes = sum(aligned(like.nbytes) for like in likes)
        if len(memory) < nbytes:
            with QUIET:  # torch would round it up to a power of two, too
                memory = self._lane.pinned((1 << (nbytes - 1).bit_length(),), torch.uint8)
        self._buffers.append((memory, copied, pinned))
        parts, used = [], 0
        for like in likes:
            part = memory[used : used + like.nbytes].view(like.dtype)
            parts.append(part.as_strided(like.shape, dense_strides(like)))
            used += aligned(like.nbytes)
        yield parts
        copied.record(self._lane.copy)

    def clear(self) -> None:
        """Let the memory go."""
        self._buffers.clear()


IN_FLIGHT = 3
"""Copies whose times are not read yet. The prefetch thread waits for a copy as old as this anyway, before it
fills the host's slot again."""


class CopySpans:
    """Recorder of the copies on a rank's copy stream.

    Args:
        lane: Lane of the rank.
        spans: Spans of the rank.

    Threads:
        The prefetch thread's.
    """

    def __init__(self, lane: Lane, spans: RankSpans) -> None:
        self._lane = lane
        self._spans = spans
        self._unused: list[Event] = []
        self._flights: deque[tuple[Event, Event]] = deque()
        self._passed = self._mark()  # a mark that the device has passed, ...
        self._passed.synchronize()
        self._passed_s = perf_counter()  # ... and when

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Context in which a copy is enqueued; at its end, copies that are over are recorded."""
        begin = self._mark()
        yield
        self._flights.append((begin, self._mark()))
        while len(self._flights) > IN_FLIGHT:
            self._land()

    def close(self) -> None:
        """Wait for the copies in flight, and record them."""
        while self._flights:
            self._land()

    def _land(self) -> None:
        begin, end = self._flights.popleft()
        end.synchronize()
        start_s = self._passed_s + self._passed.elapsed_time(begin) / 1e3
        end_s = start_s + begin.elapsed_time(end) / 1e3
        self._spans.add(Activity.TRANSFER, start_s, end_s)
        # Counted from the last mark: over hours a time from the first one would lose its digits.
        self._unused += (self._passed, begin)
        self._passed, self._passed_s = end, end_s

    def _mark(self) -> Event:
        event = self._unused.pop() if self._unused else self._lane.event(timing=True)
        event.record(self._lane.copy)
        return event
