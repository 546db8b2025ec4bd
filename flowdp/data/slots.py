"""Reused memory for batches: their layout, and the slots that hold them."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from flowdp.data.source import Batch
from flowdp.device.accelerator import is_accelerator
from flowdp.device.copies import dense_strides
from flowdp.device.streams import QUIET, Event, Lane, Stream
from flowdp.device.trees import Form, moves_itself, tensors_of

__all__ = [
    "HOST_SLOTS",
    "Layout",
    "Pool",
    "Slot",
    "await_dataset",
    "first_rows",
    "is_plain",
    "keep_for",
    "own_memory",
]


HOST_SLOTS = 3
"""Buffers of pinned memory: one is filled, one is copied, and with a third neither waits for the other."""


def is_plain(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf is a tensor that a slot can hold: dense, on the host, no subclass that says more."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not leaf.is_nested
    )


def first_rows(rows: int, memory: Tensor) -> Tensor:
    """The part of a slot's tensor for so many samples; all of one without dimensions."""
    return memory[:rows] if memory.dim() else memory


def keep_for(stream: Stream, tensors: Iterable[Tensor | None]) -> None:
    """Tell the allocator that a stream reads memory which belongs to another one, for when it is freed."""
    for leaf in tensors:
        if leaf is not None and is_accelerator(leaf.device) and leaf.layout is torch.strided:
            leaf.record_stream(stream)  # type: ignore[arg-type]


def await_dataset(leaf: Any, lane: Lane, stream: Stream) -> None:
    """Let a stream wait for the tensors of a leaf that the dataset made on a device.

    It works on the device's default stream, which ours do not wait for by themselves.
    """
    for device in {tensor.device for tensor in tensors_of(leaf)}:
        if is_accelerator(device):
            lane.await_default(stream, device)


def own_memory(leaf: Any, lane: Lane) -> Any:
    """A leaf of a batch on the device, in memory of its own; the leaf itself if it does not move.

    Streams:
        `copy` is current: it allocates there, and copies.
    """
    if is_plain(leaf):
        with QUIET:
            moved = torch.empty_like(leaf, device=lane.device)
        moved.copy_(leaf, non_blocking=True)
    elif moves_itself(leaf):
        await_dataset(leaf, lane, lane.copy)
        # Some move themselves in place, and the source may get this one back.
        own = leaf if isinstance(leaf, Tensor) else copy.copy(leaf)
        with QUIET:
            moved = own.to(lane.device)
    else:
        return leaf
    keep_for(lane.compute, tensors_of(moved))
    return moved


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor of a full batch."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, like: Tensor) -> _Form:
        # `empty_like` keeps dense strides (channels_last) and makes others dense.
        return cls(tuple(like.shape), dense_strides(like), like.dtype)

    def holds(self, leaf: object) -> bool:
        return (
            is_plain(leaf)
            and leaf.dtype == self.dtype
            and leaf.dim() == len(self.shape)
            and leaf.shape[1:] == self.shape[1:]
            and leaf.shape[:1] <= self.shape[:1]
        )

    def on(self, device: torch.device) -> Tensor:
        memory = torch.empty(self.elements, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.strides)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a full batch: its tree, and for each leaf its form, or None for no plain tensor.

    Attributes:
        tree: How the leaves make a batch; None where batches are gathered.
        forms: One per leaf.
    """

    tree: Form | None
    forms: tuple[_Form | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[object], tree: Form | None) -> Layout:
        """The layout of a full batch of these leaves."""
        return cls(tree, tuple(_Form.of(leaf) if is_plain(leaf) else None for leaf in leaves))

    @classmethod
    def of_gathered(cls, tensors: Sequence[Tensor], rows: int) -> Layout:
        """The layout of batches of so many samples of these tensors, all of them plain."""
        gathered = (torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device="meta") for t in tensors)
        return cls(None, tuple(map(_Form.of, gathered)))

    def holds(self, leaves: Sequence[object], tree: Form | None) -> bool:
        """Whether a batch has this layout, or is a shorter one."""
        return tree == self.tree and all(
            form is None or form.holds(leaf) for form, leaf in zip(self.forms, leaves, strict=True)
        )

    def on_device(self, lane: Lane) -> list[Tensor | None]:
        """Memory for a full batch that `copy`, the current stream, writes and `compute` reads.

        Raises:
            torch.OutOfMemoryError: The device has no room for it.
        """
        with QUIET:
            memory = [None if form is None else form.on(lane.device) for form in self.forms]
        keep_for(lane.compute, memory)
        return memory

    @property
    def nbytes(self) -> int:
        """Bytes of a full batch."""
        return sum(form.elements * form.dtype.itemsize for form in self.forms if form is not None)


@dataclass(slots=True)
class Pool:
    """Slots of a kind.

    Attributes:
        limit: Most slots that may exist.
        least: Fewest slots that a limit leaves.
        made: Slots that exist.
        unused: Those of them that are not in use.
    """

    limit: int
    least: int = 1
    made: int = 0
    unused: deque[Slot] = field(default_factory=deque)

    def give_back(self, slot: Slot) -> None:
        """Take back a slot; one above the limit is dropped, with its memory."""
        if self.made > self.limit:
            self.made -= 1
        else:
            self.unused.append(slot)

    def resize(self, limit: int) -> None:
        """Set the limit: unused slots above it go now, those in use when they come back."""
        self.limit = limit
        while self.unused and self.made > limit:
            self.give_back(self.unused.pop())


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory of one batch.

    Attributes:
        pool: Pool to which it is given back.
        memory: A tensor per leaf, None for a leaf that is no plain tensor. Empty where each batch has its
            own.
        ready: Recorded on `copy` behind the copy into it.
        free: Recorded on `compute` behind the step that used it.
        batch: The last batch here. Memory allocated for it alone is freed once `copy` has waited for
            `free`, because the allocator gives it to the copy stream again.
    """

    pool: Pool
    memory: list[Tensor | None]
    ready: Event
    free: Event
    batch: Batch = None
