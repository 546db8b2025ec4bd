"""NCCL for loops that one thread drives: tensors from the first rank to all, and sums of all ranks' tensors.

Tensors are packed into one row of memory for each dtype, to be sent and summed at once. As in
`flowdp.collective.nccl`, one thread launches the kernels of all ranks in one group, under `QUIET`. The ranks'
own threads wait for their next job meanwhile. Threads of the user's that allocate or pin memory of a device
at that moment are not known here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.communicators import Communicators, room_errors
from flowdp.collective.mean import arithmetic
from flowdp.collective.nccl import load
from flowdp.collective.nccl_sums import nccl_call
from flowdp.device.copies import aligned, dense_strides
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError
from flowdp.threads.shield import interrupts_held

__all__ = ["SUMMED", "NcclLoop", "Rows", "row_sizes", "rows_like"]

SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that NCCL sums."""

SENT = (*SUMMED, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The dtypes that are sent in rows, as bytes."""

Memories = Sequence[Sequence[Tensor]]
"""Contiguous tensors of each rank, on its device: equally many on all, of equal sizes and dtypes."""


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
        has = [
            view is not None and tensor is not None and _is_plain(tensor) and tensor.shape == view.shape
            for view, tensor in zip(self.views, tensors, strict=True)
        ]
        rows = list(zip(self.views, tensors, has, strict=True))
        places: list[Any] = [view for view, _, is_there in rows if is_there]
        given: list[Any] = [tensor for _, tensor, is_there in rows if is_there]
        empty = [view for view, _, is_there in rows if view is not None and not is_there]
        if places:
            torch._foreach_copy_(places, given)
        if empty:
            torch._foreach_zero_(empty)
        return has


def rows_like(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    *,
    dtypes: Container[torch.dtype] = SUMMED,
    is_wide: bool = False,
) -> list[Rows]:
    """Make room for tensors, once on each device.

    Args:
        tensors: Like those that will be put there.
        devices: Where the rows are.
        dtypes: Real dtypes that may have a row. Tensors that are empty, sparse or of a class of their own
            have no place, either.
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


def row_sizes(tensors: Sequence[Tensor], *, is_wide: bool = False) -> dict[torch.dtype, int]:
    """Elements of the rows in which tensors are summed, by dtype; see `rows_like`."""
    (rows,) = rows_like(tensors, [torch.device("meta")], is_wide=is_wide)
    return {memory.dtype: memory.numel() for memory in rows.memories}


class NcclLoop:
    """Broadcasts and sums over CUDA devices that all belong to one loop.

    The work comes after the caller's work on its current streams of all devices, and work that it
    enqueues there comes after it. Sums are taken in the dtype of the rows, in an order of NCCL's own: the
    same in each run with the same devices, sizes and version of NCCL, but not that of the ranks.

    Args:
        lanes: One per rank, on distinct CUDA devices.
        sizes: Elements of the largest rows that will be summed, by dtype.
        nccl: Replacement of `cupy.cuda.nccl`, in tests.

    Raises:
        CollectiveError: NCCL does not work here.

    Threads: one at a time; no thread of the loop may be at work on a device.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        sizes: Mapping[torch.dtype, int],
        nccl: Any = None,
    ) -> None:
        sizes = sizes or {torch.float32: 1}  # to see whether it works
        self._lanes = tuple(lanes)
        self._nccl = load() if nccl is None else nccl
        self._ready = [lane.event() for lane in lanes]
        self._start = lanes[0].event()
        self._done = [lane.event() for lane in lanes]
        with room_errors():
            self._comms = Communicators(self._nccl, lanes, [_flats(lane, sizes) for lane in lanes])

    def copies(self, tensors: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """Copies of the first rank's tensors on all devices, its own included.

        Returns:
            For each rank, like `tensors`; None for those without a place in a row, see `rows_like`.

        Raises:
            CollectiveError: As `broadcast`.
        """
        rows = rows_like(tensors, [lane.device for lane in self._lanes], dtypes=SENT)
        rows[0].fill(tensors)
        if rows[0].memories:
            self.broadcast([rank_rows.memories for rank_rows in rows])
        return [rank_rows.views for rank_rows in rows]

    def broadcast(self, rows: Memories) -> None:
        """Give all ranks the first rank's rows, of any dtypes.

        Raises:
            CollectiveError: NCCL refuses, or is closed.
        """
        self._launch([[row.view(torch.uint8) for row in rank_rows] for rank_rows in rows], "broadcast", 0)

    def reduce(self, rows: Memories) -> None:
        """Replace the first rank's rows by the sums over all ranks; the others' are undefined then.

        Raises:
            CollectiveError: As `broadcast`.
        """
        self._launch(rows, "reduce", int(self._nccl.NCCL_SUM), 0)

    def all_reduce(self, rows: Memories) -> None:
        """Replace the rows of all ranks by their sums, of the same bits everywhere.

        Raises:
            CollectiveError: As `broadcast`.
        """
        self._launch(rows, "allReduce", int(self._nccl.NCCL_SUM))

    def close(self) -> None:
        """Give the communicators back; a second time does nothing."""
        self._comms.close()

    def _launch(self, rows: Memories, name: str, *how: int) -> None:
        here = [lane.current() for lane in self._lanes]
        calls = [
            [nccl_call(self._nccl, lane, name, row, row, *how) for row in rank_rows]
            for lane, rank_rows in zip(self._lanes, rows, strict=True)
        ]
        try:
            with interrupts_held(), QUIET:  # a group of NCCL is launched whole
                for ready, stream in zip(self._ready, here, strict=True):
                    ready.record(stream)
                    self._lanes[0].comm.wait_event(ready)
                self._start.record(self._lanes[0].comm)
                for lane in self._lanes[1:]:
                    lane.comm.wait_event(self._start)
                where = ", ".join(str(lane.device) for lane in self._lanes)
                self._comms.launch(calls, f"{name} on {where}")
                # Held back to here: rows that an interrupt lets go may be allocated again.
                for done, lane, current in zip(self._done, self._lanes, here, strict=True):
                    done.record(lane.comm)
                    current.wait_event(done)
                    # Memory of the rank's thread may be freed now, and allocated again by that thread.
                    lane.compute.wait_event(done)
        except CollectiveError as error:
            self._comms.abort(error)
            raise


def _flats(lane: Lane, sizes: Mapping[torch.dtype, int]) -> list[Flat]:
    """Sizes as flats, without memory."""
    return [
        Flat(torch.zeros((), dtype=dtype, device=lane.device).expand(size), size)
        for dtype, size in sizes.items()
    ]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_inference()
    )
