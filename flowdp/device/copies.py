"""Copies of tensors between devices: many at once, and a check by value that they arrive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import permutations
from typing import TypeVar

import torch
from torch import Tensor

from flowdp.device.streams import QUIET
from flowdp.errors import OptionError

__all__ = ["ALIGNMENT", "aligned", "carry", "check_copies", "dense_strides", "move"]

ALIGNMENT = 64
"""Bytes: a tensor of any dtype may begin there, and no two share a cache line, or a vector of AVX-512."""

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


def carry(tensors: Sequence[T], device: torch.device, *, anew: bool = False) -> list[T]:
    """Many tensors on a device: those of one dtype in one copy, instead of one for each.

    Args:
        tensors: None stays None.
        device: Where they are wanted.
        anew: Whether those that lie there already are copied, too.

    Streams:
        As `move`.
    """
    carried = list(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is None or (tensor.device == device and not anew):
            continue
        if tensor.layout is torch.strided:
            groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        else:
            carried[index] = tensor.clone() if tensor.device == device else move(tensor, device)
    for indices in groups.values():
        pieces = [tensor for index in indices if (tensor := tensors[index]) is not None]
        packed = move(torch.cat([piece.reshape(-1) for piece in pieces]), device)
        parts = packed.split([piece.numel() for piece in pieces])
        for index, part, piece in zip(indices, parts, pieces, strict=True):
            carried[index] = part.view(piece.shape)
    return carried


NUMBERS = 1 << 18
"""Numbers that are copied: 1 MiB, more than one packet of any link."""


def copy_across(numbers: Tensor, one: torch.device, other: torch.device) -> Tensor:
    """Copy numbers from the host to a device, from there to another one, and back to the host."""
    return numbers.to(one).to(other).cpu()


def check_copies(devices: Sequence[torch.device]) -> None:
    """Check the copies between each two of these devices, in both directions; once per process.

    Where the driver promises peer access that the machine does not have (an IOMMU, or PCIe's access control,
    turns it away), copies between cards end elsewhere, without an error. Replicas would begin unequal, and
    means be wrong.

    Args:
        devices: Of the ranks. Those of the CPU are left out.

    Raises:
        OptionError: A copy arrived wrong.
    """
    cards = dict.fromkeys(device for device in devices if device.type != "cpu")
    with _checking:
        for one, other in permutations(cards, 2):
            if (one, other) in _fine:
                continue
            numbers = torch.arange(len(_fine), len(_fine) + NUMBERS, dtype=torch.int32, device="cpu")
            with QUIET:
                wrong = int((copy_across(numbers, one, other) != numbers).sum())
            if wrong:
                raise OptionError(
                    f"devices: of {NUMBERS:,} numbers copied from {one} to {other}, {wrong:,} arrive wrong: "
                    "the boards do not reach each other's memory as the driver claims. Switch the IOMMU (or "
                    "PCIe's ACS) off, or peer access in the driver; or train on one of them"
                )
            _fine.add((one, other))


_fine: set[tuple[torch.device, torch.device]] = set()
_checking = threading.Lock()
