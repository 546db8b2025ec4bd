"""Moving tensors between devices: many at once, and through memory of other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["aligned", "carry", "copied", "dense_strides", "move"]

ALIGNMENT = 64
"""Bytes: a tensor of any dtype may begin there, and no two share a cache line."""

T = TypeVar("T", Tensor, Tensor | None)


def aligned(nbytes: int) -> int:
    """Bytes of a tensor in memory where others lie behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a copy: those of the tensor where they leave no gaps, else dense ones in the same order."""
    return torch.empty_like(tensor, device="meta").stride()


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: itself where it lies there.

    Streams:
        The current ones of both devices; the host waits only for a copy to its own memory.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def carry(tensors: Sequence[T], device: torch.device) -> list[T]:
    """Many tensors on a device: those of one dtype in one copy, instead of one for each.

    Args:
        tensors: None stays None.
        device: Where they are wanted.

    Streams:
        As `move`.
    """
    carried = list(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is None or tensor.device == device:
            continue
        if tensor.layout is torch.strided:
            groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        else:
            carried[index] = move(tensor, device)
    for indices in groups.values():
        pieces = [tensor for index in indices if (tensor := tensors[index]) is not None]
        for index, piece in zip(indices, _unpacked(move(_packed(pieces), device), pieces), strict=True):
            carried[index] = piece
    return carried


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of many tensors of one device: those of one dtype by one operation."""
    copies = list(tensors)
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            groups.setdefault(tensor.dtype, []).append(index)
        else:
            copies[index] = tensor.clone()
    for indices in groups.values():
        pieces = [tensors[index] for index in indices]
        for index, piece in zip(indices, _unpacked(_packed(pieces), pieces), strict=True):
            copies[index] = piece
    return copies


def _packed(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
