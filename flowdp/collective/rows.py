"""Tensors packed into one row of memory per dtype, to be sent and summed at once."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowdp.collective.mean import arithmetic
from flowdp.device.copies import aligned, dense_strides

__all__ = ["Rows", "rows_like"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows on one device.

    Attributes:
        memories: One for each dtype. The gaps between tensors hold anything.
        views: Each tensor in its row, with a version counter of its own; None where there is no place.
    """

    memories: list[Tensor]
    views: list[Tensor | None]

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor | None]) -> list[bool]:
        """Copy tensors to their places; returns whether each is there. A place without one becomes zero.

        Threads: any, one at a time.
        """
        has: list[bool] = []
        places: list[Tensor] = []
        given: list[Tensor] = []
        empty: list[Tensor] = []
        for view, tensor in zip(self.views, tensors, strict=True):
            if view is not None and tensor is not None and _is_plain(tensor) and tensor.shape == view.shape:
                places.append(view)
                given.append(tensor)
            elif view is not None:
                empty.append(view)
            has.append(bool(places) and places[-1] is view)
        if places:
            torch._foreach_copy_(places, given)
        if empty:
            torch._foreach_zero_(empty)
        return has


def rows_like(
    tensors: Sequence[Tensor],
    dtypes: Container[torch.dtype],
    devices: Sequence[torch.device],
    *,
    is_wide: bool = False,
) -> list[Rows]:
    """Make room for tensors, once on each device.

    Args:
        tensors: Like those that will be put there.
        dtypes: Real dtypes that may have a row. Tensors that are empty, sparse or of a class of their own
            have no place, either.
        devices: Where the rows are.
        is_wide: Whether the rows have the dtypes in which tensors are summed.
    """
    places: list[tuple[torch.dtype, int, tuple[int, ...]] | None] = []
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        dtype = tensor.dtype.to_real()
        if not (_is_plain(tensor) and dtype in dtypes and tensor.numel()):
            places.append(None)
            continue
        dtype = arithmetic(dtype) if is_wide else dtype
        start = sizes.get(dtype, 0)
        places.append((dtype, start, tensor.stride() if tensor.is_contiguous() else dense_strides(tensor)))
        count = tensor.numel() * (2 if tensor.is_complex() else 1)
        sizes[dtype] = start + aligned(count * dtype.itemsize) // dtype.itemsize
    made = []
    for device in devices:
        memories = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        views: list[Tensor | None] = []
        for tensor, place in zip(tensors, places, strict=True):
            if place is None:
                views.append(None)
                continue
            memory, start = memories[place[0]], place[1]
            if tensor.is_complex():
                memory, start = torch.view_as_complex(memory.view(-1, 2)), start // 2
            views.append(memory.as_strided(tensor.shape, place[2], start).data)
        made.append(Rows(list(memories.values()), views))
    return made


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_inference()
    )
