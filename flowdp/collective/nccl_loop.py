"""NCCL for loops that one thread drives: tensors from the first rank to all, and sums of all ranks' tensors.

As in `flowdp.collective.nccl`, one thread launches the kernels of all ranks in one group, under `QUIET`. The
ranks' own threads wait for their next job meanwhile. Threads of the user's that allocate or pin memory of a
device at that moment are not known here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.nccl import load
from flowdp.collective.nccl_setup import (
    Call,
    Communicators,
    CommunicatorSetup,
    nccl_call,
    nccl_errors,
    room_errors,
)
from flowdp.collective.rows import rows_like
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError
from flowdp.threads.shield import interrupts_held

__all__ = ["SUMMED", "NcclLoop"]

SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that NCCL sums."""

Rows = Sequence[Sequence[Tensor]]
"""Contiguous tensors of each rank, on its device: equally many on all, of equal sizes and dtypes."""


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
            setup = CommunicatorSetup(self._nccl, lanes, [_flats(lane, sizes) for lane in lanes])
            self._comms = Communicators(self._nccl, lanes, setup.wait)

    def copies(self, tensors: Sequence[Tensor], dtypes: Container[torch.dtype]) -> list[list[Tensor | None]]:
        """Copies of the first rank's tensors on all devices, its own included.

        Args:
            tensors: Of the first rank.
            dtypes: Dtypes that are sent.

        Returns:
            For each rank, like `tensors`; None for those without a place in a row, see `rows_like`.

        Raises:
            CollectiveError: As `broadcast`.
        """
        rows = rows_like(tensors, dtypes, [lane.device for lane in self._lanes])
        rows[0].fill(tensors)
        if rows[0].memories:
            self.broadcast([rank_rows.memories for rank_rows in rows])
        return [rank_rows.views for rank_rows in rows]

    def broadcast(self, rows: Rows) -> None:
        """Give all ranks the first rank's rows, of any dtypes.

        Raises:
            CollectiveError: NCCL refuses, or is closed.
        """
        self._launch(rows, "broadcast", 0)

    def reduce(self, rows: Rows) -> None:
        """Replace the first rank's rows by the sums over all ranks; the others' are undefined then.

        Raises:
            CollectiveError: As `broadcast`.
        """
        self._launch(rows, "reduce", int(self._nccl.NCCL_SUM), 0)

    def all_reduce(self, rows: Rows) -> None:
        """Replace the rows of all ranks by their sums, of the same bits everywhere.

        Raises:
            CollectiveError: As `broadcast`.
        """
        self._launch(rows, "allReduce", int(self._nccl.NCCL_SUM))

    def close(self) -> None:
        """Give the communicators back; a second time does nothing."""
        self._comms.close()

    def _calls(self, lane: Lane, rows: Sequence[Tensor], name: str, *how: int) -> list[Call]:
        if name == "broadcast":
            rows = [row.view(torch.uint8) for row in rows]
        return [nccl_call(self._nccl, lane, name, row, row, *how) for row in rows]

    def _launch(self, rows: Rows, name: str, *how: int) -> None:
        here = [lane.current() for lane in self._lanes]
        calls = [
            self._calls(lane, rank_rows, name, *how)
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
                with nccl_errors(self._nccl, f"{name} on {where}"):
                    self._comms.launch(calls)
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
