"""Parameters on their way to other devices than the first, and gradients on their way back.

Between several CUDA devices NCCL carries both: parameters lie in one row of memory for each dtype, so that
one broadcast sends them; gradients are put into a row on each device, summed by one reduction, and come out
as views of the first device's row. What has no place in a row is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowdp.collective.gradient_sum import Gradients, add_up
from flowdp.collective.nccl_loop import SUMMED, NcclLoop
from flowdp.collective.rows import Rows, rows_like
from flowdp.device.copies import carry
from flowdp.device.streams import Lane

__all__ = ["Copying", "DeviceCopies", "Link", "Packed", "Reducing"]

Link = Callable[[Sequence[Lane], Mapping[torch.dtype, int]], NcclLoop | None]
"""Opens NCCL for rows of these sizes; None: it is not used."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The gradients of one rank, on their way to the first device.

    Attributes:
        rows: On its own device, for NCCL; None: there are none.
        has: Flag per parameter: it has a gradient in there.
        rest: Those that are not in there, on the first device.
    """

    rows: Rows | None
    has: list[bool]
    rest: Gradients


class Copying:
    """Sums gradients on the first device (`home`), to which each rank copies its own."""

    def __init__(self, home: torch.device) -> None:
        self._home = home

    def pack(self, gradients: Gradients, _device: torch.device) -> Packed:
        """Bring a rank's gradients to the first device, on the current streams of both."""
        return Packed(None, [], carry(gradients, self._home))

    def sum(self, ranks: Sequence[Packed]) -> Gradients:
        """The sums, on the first device, rank after rank; None where no rank has a gradient."""
        return add_up([rank.rest for rank in ranks])


class Reducing(Copying):
    """Sums gradients over NCCL: each rank puts its own into rows, which are reduced in place.

    Args:
        loop: NCCL.
        tensors: Tensors of the first rank; their gradients are summed.
        home: The first device.
    """

    def __init__(self, loop: NcclLoop, tensors: Sequence[Tensor], home: torch.device) -> None:
        super().__init__(home)
        self._loop = loop
        self._tensors = tensors

    def pack(self, gradients: Gradients, device: torch.device) -> Packed:
        """Put a rank's gradients into rows, on its device's current stream."""
        (rows,) = rows_like(self._tensors, SUMMED, [device])
        has = rows.fill(gradients)
        rest = [None if is_in else gradient for is_in, gradient in zip(has, gradients, strict=True)]
        return Packed(rows, has, carry(rest, self._home))

    def sum(self, ranks: Sequence[Packed]) -> Gradients:
        """The sums over all ranks, on the first device, in the order of NCCL; None where none has a gradient.

        Raises:
            CollectiveError: NCCL fails.

        Streams:
            The caller's current ones of all devices.
        """
        is_there = [any(column) for column in zip(*(rank.has for rank in ranks), strict=True)]
        sums: Gradients = [None] * len(is_there)
        rows = [rank.rows for rank in ranks if rank.rows is not None]
        if any(is_there):
            self._loop.reduce([own.memories for own in rows])
            sums = [view if is_one else None for view, is_one in zip(rows[0].views, is_there, strict=True)]
        return add_up([sums, *(rank.rest for rank in ranks if any(t is not None for t in rank.rest))])


class DeviceCopies:
    """The module's parameters on the devices of the other ranks: new copies for each call.

    So no later call writes to what a graph may have saved.

    Args:
        parameters: Those of the user's module.
        lanes: One per rank.
        link: Opens NCCL; None: the copies are carried.

    Raises:
        CollectiveError: NCCL was asked for, and does not work here.

    Threads: the user's.
    """

    def __init__(self, parameters: Sequence[Tensor], lanes: Sequence[Lane], link: Link | None) -> None:
        self._lanes = tuple(lanes)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        (rows,) = rows_like(trained, SUMMED, [torch.device("meta")])
        sizes = {memory.dtype: memory.numel() for memory in rows.memories}
        self._loop = link(lanes, sizes) if link is not None and sizes else None

    def send(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copies of the module's parameters for a call, leaves that require grad where those do.

        Returns:
            For each other rank, like `parameters`.

        Raises:
            CollectiveError: NCCL fails.

        Streams:
            The caller's current ones of all devices.
        """
        sent: Sequence[Gradients] = [[None] * len(parameters) for _ in self._lanes]
        if self._loop is not None:
            sent = self._loop.copies(parameters, SUMMED)
        return [
            [
                (_copy(tensor, lane) if there is None else there).requires_grad_(tensor.requires_grad)
                for tensor, there in zip(parameters, column, strict=True)
            ]
            for lane, column in zip(self._lanes[1:], sent[1:], strict=True)
        ]

    def carrier(self, tensors: Sequence[Tensor], *, is_whole: bool) -> Copying:
        """The transfer of the gradients of tensors; `is_whole`: all ranks give some, which NCCL needs."""
        home = self._lanes[0].device
        if self._loop is None or not is_whole:
            return Copying(home)
        return Reducing(self._loop, tensors, home)

    def close(self) -> None:
        """Give NCCL back."""
        if self._loop is not None:
            self._loop.close()


def _copy(tensor: Tensor, lane: Lane) -> Tensor:
    # The host waits for copies to its own memory alone.
    return tensor.detach().to(lane.device, non_blocking=lane.device.type != "cpu", copy=True)
