"""Leaves of batches on their way to a device."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from flowdp.device.accelerator import is_accelerator
from flowdp.device.streams import QUIET, Lane, Stream
from flowdp.device.trees import tensors_of

__all__ = ["await_dataset", "is_plain", "keep_for", "own_memory"]


def is_plain(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf is a tensor without surprises: dense, on the host, no subclass that says more."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not leaf.is_nested
    )


def keep_for(stream: Stream, tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that a stream reads memory which belongs to another one, for when it is freed."""
    for leaf in tensors:
        if is_accelerator(leaf.device) and leaf.layout is torch.strided:
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

    Memory of a plain tensor belongs to the copy stream, which has to wait for its readers before it is freed.

    Streams:
        `copy` is current: it allocates there, and copies.
    """
    if is_plain(leaf):
        with QUIET:
            moved = torch.empty_like(leaf, device=lane.device)
        return moved.copy_(leaf, non_blocking=True)
    if not hasattr(leaf, "to"):
        return leaf
    await_dataset(leaf, lane, lane.copy)
    # Some move themselves in place, and the source may get this one back.
    own = leaf if isinstance(leaf, Tensor) else copy.copy(leaf)
    with QUIET:
        moved = own.to(lane.device)
    keep_for(lane.compute, tensors_of(moved))
    return moved
