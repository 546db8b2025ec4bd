"""NCCL for loops that one thread drives: tensors from the first rank to all, and sums of all ranks' tensors.

As in `flowdp.collective.nccl`, one thread launches the kernels of all ranks in one group, under `QUIET`. The
ranks' own threads wait for their next job meanwhile. Threads of the user's that allocate or pin memory of a
device at that moment are not known here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.nccl import load
from flowdp.collective.nccl_setup import (
    ABORT_S,
    CHECKED,
    CommunicatorSetup,
    abort_all,
    abort_quietly,
    nccl_dtype,
    nccl_errors,
)
from flowdp.collective.on_streams import ROUNDS
from flowdp.collective.watchdog import LIMIT_S, Watchdog
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError

__all__ = ["SUMMED", "NcclLoop"]

log = logging.getLogger("flowdp")

SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that NCCL sums."""

Rows = Sequence[Sequence[Tensor]]
"""Contiguous tensors of each rank, on its device: equally many on all, of equal sizes and dtypes."""

_Call = tuple[int, int, int]
"""Address, count and NCCL's dtype."""


class _Marks:
    """The marks of one launch. They are recorded again `ROUNDS` launches later."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.ready = [lane.event() for lane in lanes]
        self.start = lanes[0].event()
        self.done = [lane.event() for lane in lanes]
        self.is_recorded = False


class NcclLoop:
    """Broadcasts and sums over CUDA devices that all belong to one loop.

    The work comes after the caller's work on its current streams of all devices, and work that it
    enqueues there comes after it. Sums are taken in the dtype of the rows, in an order of NCCL's own: the
    same in each run with the same devices, sizes and version of NCCL, but not that of the ranks.

    Args:
        lanes: One per rank, on distinct CUDA devices.
        sizes: Elements of the largest rows that will be summed, by dtype.
        held: Makes a context that holds interrupts (Ctrl-C) back: a group of NCCL is launched whole.
        nccl: Replacement of `cupy.cuda.nccl`, in tests.

    Raises:
        CollectiveError: NCCL does not work here.

    Threads: one at a time; no thread of the loop may be at work on a device.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        sizes: Mapping[torch.dtype, int],
        held: Callable[[], AbstractContextManager[Any]] = nullcontext,
        nccl: Any = None,
    ) -> None:
        sizes = sizes or {torch.float32: 1}  # to see whether it works
        self._lanes = tuple(lanes)
        self._held = held
        self._nccl = load([lane.device for lane in lanes]) if nccl is None else nccl
        self._lock = threading.Lock()  # guards the two below, which an abort and a close change
        self._comms: list[Any] = []
        self._error: CollectiveError | None = None
        self._marks = [_Marks(lanes) for _ in range(ROUNDS)]
        self._launches = 0
        try:
            self._comms = CommunicatorSetup(self._nccl, lanes, [_flats(lane, sizes) for lane in lanes]).wait()
            self._watchdog = Watchdog([lane.device for lane in lanes], LIMIT_S, self._give_up)
            try:
                self._check(sizes)
            except BaseException:
                self.close()
                raise
        except torch.OutOfMemoryError as error:
            raise CollectiveError(
                f"no room for NCCL beside the replicas; backend='local' does without: {error}"
            ) from error

    def broadcast(self, rows: Rows) -> None:
        """Give all ranks the first rank's rows, of any dtypes.

        Raises:
            CollectiveError: NCCL refuses, has hung before, or is closed.
        """
        byte = int(self._nccl.NCCL_UINT8)
        calls = [[(row.data_ptr(), row.numel() * row.itemsize, byte) for row in own] for own in rows]
        self._launch(
            calls, lambda comm, at, count, dtype, stream: comm.broadcast(at, at, count, dtype, 0, stream)
        )

    def reduce(self, rows: Rows) -> None:
        """Replace the first rank's rows by the sums over all ranks; the others' are undefined then.

        Raises:
            CollectiveError: As `broadcast`.
        """
        add = int(self._nccl.NCCL_SUM)
        self._launch(
            self._summed(rows),
            lambda comm, at, count, dtype, stream: comm.reduce(at, at, count, dtype, add, 0, stream),
        )

    def all_reduce(self, rows: Rows) -> None:
        """Replace the rows of all ranks by their sums, of the same bits everywhere.

        Raises:
            CollectiveError: As `broadcast`.
        """
        add = int(self._nccl.NCCL_SUM)
        self._launch(
            self._summed(rows),
            lambda comm, at, count, dtype, stream: comm.allReduce(at, at, count, dtype, add, stream),
        )

    def close(self) -> None:
        """Give the communicators back; a second time does nothing."""
        self._watchdog.close()
        comms = self._take(CollectiveError("the connections of NCCL have been closed"))
        if not comms:
            return
        # The garbage collector may call this from a thread that holds QUIET, and then must not wait.
        if QUIET.acquire(timeout=ABORT_S / 2):
            try:
                self._destroy(comms)
            finally:
                QUIET.release()
        else:
            threading.Thread(target=self._destroy_later, args=(comms,), name="flowdp-nccl-close").start()

    def _destroy(self, comms: list[Any]) -> None:
        try:
            for lane in self._lanes:
                lane.drain()
            while comms:
                comms.pop(0).destroy()  # the last one frees the memory of all
        except BaseException:
            abort_all(comms)  # else the garbage collector destroys them, at any time
            raise

    def _destroy_later(self, comms: list[Any]) -> None:
        with QUIET:
            self._destroy(comms)

    def _summed(self, rows: Rows) -> list[list[_Call]]:
        return [
            [(row.data_ptr(), row.numel(), nccl_dtype(self._nccl, row.dtype)) for row in own] for own in rows
        ]

    def _launch(
        self, calls: Sequence[Sequence[_Call]], call: Callable[[Any, int, int, int, int], None]
    ) -> None:
        marks = self._next_marks()
        here = [lane.current() for lane in self._lanes]
        handles = [getattr(lane.comm, "cuda_stream", 0) for lane in self._lanes]
        comms = self._open_comms()
        with self._held(), QUIET:
            for ready, stream in zip(marks.ready, here, strict=True):
                ready.record(stream)
                self._lanes[0].comm.wait_event(ready)
            marks.start.record(self._lanes[0].comm)
            for lane in self._lanes[1:]:
                lane.comm.wait_event(marks.start)
            try:
                with nccl_errors(self._nccl, f"work on {self._where()}"):
                    self._nccl.groupStart()
                    try:
                        for comm, own, handle in zip(comms, calls, handles, strict=True):
                            for at, count, dtype in own:
                                call(comm, at, count, dtype, handle)
                    finally:
                        self._nccl.groupEnd()
            except CollectiveError as error:
                abort_all(self._take(error))
                raise
            marks.is_recorded = True
            # Held back to here: rows that an interrupt lets go may be allocated again.
            for done, lane, current in zip(marks.done, self._lanes, here, strict=True):
                done.record(lane.comm)
                current.wait_event(done)
                # Memory of the rank's thread may be freed now, and allocated again by that thread.
                lane.compute.wait_event(done)
        self._watchdog.launched(self._launches, marks.start, marks.done)

    def _next_marks(self) -> _Marks:
        """Marks that every device has passed; the host runs half of them ahead, at most.

        The watchdog looks at the other half: `ROUNDS // 2` launches.
        """
        self._launches += 1
        earlier = self._marks[(self._launches - ROUNDS // 2) % ROUNDS]
        if earlier.is_recorded:
            for done in earlier.done:
                done.synchronize()
        return self._marks[self._launches % ROUNDS]

    def _open_comms(self) -> list[Any]:
        with self._lock:
            if self._error is not None:
                raise type(self._error)(
                    f"{self._error}; begin anew, with backend='local' where NCCL is to be left out"
                )
            return list(self._comms)

    def _check(self, sizes: Mapping[torch.dtype, int]) -> None:
        """Send and sum known values of the sizes to come: NCCL connects a way when it is first asked for.

        Raises:
            CollectiveError: Wrong values came out.
        """
        with QUIET:
            rows = [
                [
                    torch.full((min(size, CHECKED),), rank + 1.0, dtype=dtype, device=lane.device)
                    for dtype, size in sizes.items()
                ]
                for rank, lane in enumerate(self._lanes)
            ]
        self.broadcast(rows)
        self._compare([row for own in rows for row in own], 1.0)
        self.reduce(rows)
        self._compare(rows[0], float(len(self._lanes)))

    def _compare(self, rows: Sequence[Tensor], wanted: float) -> None:
        ends = [float(end) for row in rows for end in torch.aminmax(row)]  # waits for the device
        self._open_comms()  # or it has hung, and was aborted
        if any(end != wanted for end in ends):
            raise CollectiveError(
                f"NCCL on {self._where()} gives wrong values: the boards do not reach each other's memory as "
                "they claim; try NCCL_P2P_DISABLE=1"
            )

    def _give_up(self, error: CollectiveError) -> None:
        """Release devices that hang: their results since are not to be trusted."""
        log.error("%s. The gradients and parameters since then are not right", error)
        abort_quietly(self._take(error))

    def _take(self, error: CollectiveError) -> list[Any]:
        with self._lock:
            self._error = self._error or error
            comms, self._comms = self._comms, []
        return comms

    def _where(self) -> str:
        return ", ".join(str(lane.device) for lane in self._lanes)


def _flats(lane: Lane, sizes: Mapping[torch.dtype, int]) -> list[Flat]:
    """Sizes as flats, without memory."""
    return [
        Flat(torch.zeros((), dtype=dtype, device=lane.device).expand(size), size)
        for dtype, size in sizes.items()
    ]
