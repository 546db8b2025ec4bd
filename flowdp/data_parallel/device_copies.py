"""Parameters on their way to other devices than the first, and gradients on their way back.

Between several CUDA devices NCCL carries both: the copies' parameters lie in one row of memory for each
dtype, so that one broadcast sends them; gradients are put into a row on each device, summed by one reduction,
and come out as views of the first device's row. What has no place in a row is copied.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import Gradients, add_up
from flowdp.collective.nccl_loop import SUMMED, NcclLoop
from flowdp.collective.rows import PackedRows, RowPlace
from flowdp.device.copies import carry
from flowdp.device.streams import Lane

__all__ = ["Copying", "DeviceCopies", "Link", "Packed", "Reducing"]

Link = Callable[[Sequence[Lane], Mapping[torch.dtype, int]], NcclLoop | None]
"""Opens NCCL for rows of these sizes; None: it is not used."""

State = tuple[int, int, int]
"""Identity, version and address of a tensor."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The gradients of one rank, on their way to the first device.

    Attributes:
        rows: On its own device, for NCCL.
        has: Flag per parameter: it has a gradient in there.
        rest: Those that are not in there, on the first device.
    """

    rows: list[Tensor]
    has: list[bool]
    rest: Gradients


class Copying:
    """Sums gradients on the first device (`home`), to which each rank copies its own."""

    def __init__(self, home: torch.device) -> None:
        self._home = home

    def pack(self, gradients: Gradients, _device: torch.device) -> Packed:
        """Bring a rank's gradients to the first device, on the current streams of both."""
        return Packed([], [], carry(gradients, self._home))

    def sum(self, ranks: Sequence[Packed]) -> Gradients:
        """The sums, on the first device, rank after rank; None where no rank has a gradient."""
        return add_up([one.rest for one in ranks])


class Reducing:
    """Sums gradients over NCCL: each rank puts its own into rows, which are reduced in place.

    Args:
        loop: NCCL.
        tensors: Tensors of the first rank; their gradients are summed.
        home: The first device.
    """

    def __init__(self, loop: NcclLoop, tensors: Sequence[Tensor], home: torch.device) -> None:
        self._loop = loop
        self._rows = PackedRows(tensors, SUMMED)
        self._home = home

    def pack(self, gradients: Gradients, device: torch.device) -> Packed:
        """Put a rank's gradients into rows, on its device's current stream."""
        places = zip(self._rows.places, gradients, strict=True)
        has = [place is not None and one is not None and place.fits(one) for place, one in places]
        rest = [None if is_in else one for is_in, one in zip(has, gradients, strict=True)]
        return Packed(self._rows.pack(gradients, device), has, carry(rest, self._home))

    def sum(self, ranks: Sequence[Packed]) -> Gradients:
        """The sums over all ranks, on the first device, in the order of NCCL; None where none has a gradient.

        Raises:
            CollectiveError: NCCL fails.

        Streams:
            The caller's current ones of all devices.
        """
        is_there = [any(column) for column in zip(*(one.has for one in ranks), strict=True)]
        sums: Gradients = [None] * len(is_there)
        if any(is_there):
            self._loop.reduce([one.rows for one in ranks])
            views = self._rows.views(ranks[0].rows)
            sums = [view if is_one else None for view, is_one in zip(views, is_there, strict=True)]
        return add_up([sums, *(one.rest for one in ranks if any(t is not None for t in one.rest))])


class DeviceCopies:
    """The module's parameters on the devices of the other ranks.

    They are sent anew before each call, for not every write is counted (`parameter.data`). While a graph
    lives that may have saved the copies, tensors that have been written to since, by torch's count or by
    `note_writes`, get other copies, for one call; a write that is not counted reaches the graph, as it does
    on one device.

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
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sent: list[State] = []
        self._written: set[int] = set()  # identities of those that have been written to since
        self._copies: list[list[Tensor]] = []
        self._memories: list[list[Tensor]] = []
        self._reducing: tuple[list[Tensor], Reducing] | None = None
        counts = Counter(map(_memory, parameters))  # cuDNN's weights lie together, and stay so
        is_free = [t.requires_grad and counts[_memory(t)] == 1 for t in parameters]
        self._rows = PackedRows(parameters, SUMMED, is_free)
        self._loop: NcclLoop | None = None
        if link is not None and self._rows.sizes:
            self._loop = link(lanes, PackedRows([t for t in parameters if t.requires_grad], SUMMED).sizes)
        if self._loop is None:
            self._rows = PackedRows([], SUMMED)

    def hold(self, graph: Any) -> None:
        """Leave the copies as they are while `graph.is_alive`."""
        self._graphs.add(graph)

    def note_writes(self, parameters: Sequence[Tensor]) -> None:
        """Note writes to parameters that torch may not have counted, as those of fused optimizers."""
        self._written.update(map(id, parameters))

    def send(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copies of the module's parameters for a call, leaves that require grad where those do.

        Returns:
            For each other rank, like `parameters`.

        Raises:
            CollectiveError: NCCL fails.

        Streams:
            The caller's current ones of all devices.
        """
        now = [_state(tensor) for tensor in parameters]
        is_new = not self._copies or not _are_alike(self._copies[0], parameters)
        if is_new:
            self._open(parameters)
        is_free = is_new or not any(graph.is_alive for graph in self._graphs)
        if is_free:
            self._sent = now
            self._written.clear()
        written = [i for i, one in enumerate(now) if one != self._sent[i] or one[0] in self._written]
        self._fill(parameters, written, is_free=is_free)
        columns = []
        for lane, own in zip(self._lanes[1:], self._copies, strict=True):
            column: list[Tensor] = list(own)
            for i in written:
                column[i] = parameters[i].detach().to(lane.device, non_blocking=_waits_not(lane), copy=True)
            # A graph that lives keeps its leaves, with their flags.
            columns.append(
                [
                    one
                    if one.requires_grad is tensor.requires_grad
                    else one.detach().requires_grad_(tensor.requires_grad)
                    for one, tensor in zip(column, parameters, strict=True)
                ]
            )
        return columns

    def carrier(self, tensors: Sequence[Tensor], *, is_whole: bool) -> Copying | Reducing:
        """The transfer of the gradients of tensors; `is_whole`: all ranks give some, which NCCL needs."""
        if self._loop is None or not is_whole:
            return Copying(self._lanes[0].device)
        known = self._reducing
        if known is None or not _are_alike(known[0], tensors):
            known = self._reducing = (
                list(tensors),
                Reducing(self._loop, tensors, self._lanes[0].device),
            )
        return known[1]

    def close(self) -> None:
        """Give NCCL back."""
        if self._loop is not None:
            self._loop.close()

    @torch.inference_mode(False)
    def _open(self, parameters: Sequence[Tensor]) -> None:
        """Make memory for copies: parameters that were trained at first lie in rows, for NCCL."""
        self._copies, self._memories = [], []
        for lane in self._lanes[1:]:
            memories = [torch.zeros(n, dtype=d, device=lane.device) for d, n in self._rows.sizes.items()]
            own = [torch.empty_like(tensor, device=lane.device).detach() for tensor in parameters]
            for i, place in self._in_rows(parameters):
                own[i] = place.view(memories[place.row])
            self._memories.append(memories)
            self._copies.append(own)

    @torch.no_grad()
    def _fill(self, parameters: Sequence[Tensor], written: Sequence[int], *, is_free: bool) -> None:
        """Send all parameters but those in `written` into the memory of the copies.

        Args:
            parameters: All.
            written: Indices of those that are not sent.
            is_free: Whether no graph has saved the copies; else writes to them are not counted.
        """
        in_rows = [] if written else self._in_rows(parameters)
        if self._loop is not None and in_rows:
            sent: list[Tensor | None] = [None] * len(self._rows.places)
            for i, _ in in_rows:
                sent[i] = parameters[i].detach()
            self._loop.broadcast([self._rows.pack(sent, self._lanes[0].device), *self._memories])
            if is_free:  # NCCL's writes are not counted
                torch.autograd.graph.increment_version([own[i] for own in self._copies for i, _ in in_rows])
        rest = set(range(len(parameters))).difference(written, (i for i, _ in in_rows))
        for lane, own in zip(self._lanes[1:], self._copies, strict=True):
            for i in rest:
                memory = own[i] if is_free else own[i].data
                memory.copy_(parameters[i], non_blocking=_waits_not(lane))
            for one, tensor in zip(own, parameters, strict=True):
                if is_free:
                    one.requires_grad_(tensor.requires_grad)

    def _in_rows(self, parameters: Sequence[Tensor]) -> list[tuple[int, RowPlace]]:
        """The parameters that have a place in a row, by their index."""
        pairs = zip(self._rows.places, parameters, strict=False)  # the module may have got others since
        return [(i, place) for i, (place, one) in enumerate(pairs) if place is not None and place.fits(one)]


def _waits_not(lane: Lane) -> bool:
    """Whether the host need not wait for a copy to a lane's device."""
    return lane.device.type != "cpu"


def _state(tensor: Tensor) -> State:
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _are_alike(mine: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(mine) == len(others) and all(
        one.shape == other.shape and one.dtype == other.dtype for one, other in zip(mine, others, strict=True)
    )


def _memory(tensor: Tensor) -> int:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel()
    return tensor.untyped_storage().data_ptr() if is_plain else id(tensor)
