"""NCCL in a loop that the user owns: parameters go to the replicas, gradients to the first device.

The replicas' parameters lie in one row of memory for each dtype, so that those which the user's optimizer has
stepped are sent by one broadcast, into place. Gradients are put into a row on each device, summed by one
reduction, and come out as views of the first device's row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import Gradients, add_up
from flowdp.collective.nccl_loop import SUMMED, NcclLoop
from flowdp.collective.rows import PackedRows
from flowdp.data_parallel.module_tensors import ModuleTensors
from flowdp.device.copies import carry
from flowdp.device.streams import Lane

__all__ = ["Copying", "Link", "NcclTransfer", "Packed", "Reducing", "State", "is_elsewhere"]

Link = Callable[[Sequence[Lane], Mapping[torch.dtype, int]], NcclLoop | None]
"""Opens NCCL for rows of these sizes; None: it is not used."""

State = tuple[Tensor, float, int, bool]
"""A tensor of the user's module, its version and address, and whether it requires grad."""


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
        parameters: Parameters of the first rank; their gradients are summed.
        home: The first device.
    """

    def __init__(self, loop: NcclLoop, parameters: Sequence[Tensor], home: torch.device) -> None:
        self._loop = loop
        self._parameters = parameters  # kept, or others might get their identities
        self._rows = PackedRows(parameters, SUMMED)
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


class NcclTransfer:
    """NCCL between the modules of a loop.

    Memory: a copy of the changed parameters on the first device while they are sent, and of the gradients on
    every device while they are summed.

    Args:
        loop: NCCL.
        rows: Rows of the parameters that `trained` lists.
        tables: ModuleTensors of all modules. Replicas' parameters are moved, values kept.
        lanes: One per rank.

    Threads: the user's.
    """

    def __init__(
        self, loop: NcclLoop, rows: PackedRows, tables: Sequence[ModuleTensors], lanes: Sequence[Lane]
    ) -> None:
        self._loop = loop
        self._rows = rows
        self._tensors = tables
        self._home = lanes[0].device
        self._places = {index: place for index, place in enumerate(rows.places) if place is not None}
        self._sent: dict[int, State] = {}
        self._sums: dict[tuple[int, ...], Reducing] = {}
        self._memories: list[list[Tensor]] = []
        self._pointers: list[dict[int, int]] = []
        for table, lane in zip(tables[1:], lanes[1:], strict=True):
            with lane.on(lane.compute), torch.inference_mode(False), torch.no_grad():
                self._take_in(table, lane.device)
            lane.drain()

    @classmethod
    def open(cls, link: Link, tables: Sequence[ModuleTensors], lanes: Sequence[Lane]) -> NcclTransfer | None:
        """NCCL for the parameters trained now; None: there are none, or it is not used.

        Raises:
            CollectiveError: It was asked for, and does not work here.
        """
        columns = list(zip(*(table.parameters for table in tables), strict=True))
        shared = Counter(_memory(tensor) for table in tables for tensor in table.tensors)
        # Weights that share memory stay together: cuDNN's, or those that are tied by it.
        is_free = [
            column[0].requires_grad
            and all(type(one) is nn.Parameter and shared[_memory(one)] == 1 for one in column)
            for column in columns
        ]
        rows = PackedRows([column[0] for column in columns], SUMMED, is_free)
        if not rows.sizes:
            return None
        loop = link(lanes, PackedRows([c[0] for c in columns if c[0].requires_grad], SUMMED).sizes)
        return None if loop is None else cls(loop, rows, tables, lanes)

    def carries(self, index: int) -> bool:
        """Whether a parameter reaches the replicas by `send`."""
        return index in self._places

    def send(self, now: Sequence[State]) -> None:
        """Send the parameters that have been written to since the last time, of the tensors as they are now.

        Raises:
            CollectiveError: NCCL fails.

        Streams:
            The caller's current ones of all devices.
        """
        changed = [i for i in self._places if _is_other(now[i], self._sent.get(i))]
        if not changed:
            return
        columns = [table.parameters for table in self._tensors[1:]]
        for i in changed:
            if any(own[i].data_ptr() != at[i] for own, at in zip(columns, self._pointers, strict=True)):
                del self._places[i]  # a module has moved it: it is copied from now on
        runs = self._runs([i for i in changed if i in self._places and self._places[i].fits(now[i][0])])
        if not runs:
            return
        rows = [[self._rows.strip([(self._places[i], now[i][0]) for i in run], self._home) for run in runs]]
        for memories in self._memories:
            spans = ((self._places[run[0]], self._places[run[-1]].stop) for run in runs)
            rows.append([memories[first.row][first.start : stop] for first, stop in spans])
        self._loop.broadcast(rows)
        sent = [i for run in runs for i in run]
        # So that torch finds the write in graphs that are kept.
        torch.autograd.graph.increment_version([own[i] for own in columns for i in sent])
        self._sent.update((i, now[i]) for i in sent)

    def forget(self) -> None:
        """Send everything anew."""
        self._sent.clear()

    def reducing(self, parameters: Sequence[Tensor]) -> Reducing:
        """Sums the gradients of parameters, which are all ranks' in the same order."""
        key = tuple(map(id, parameters))
        if key not in self._sums:
            self._sums[key] = Reducing(self._loop, parameters, self._home)
        return self._sums[key]

    def close(self) -> None:
        """Give NCCL back."""
        self._loop.close()

    def _take_in(self, table: ModuleTensors, device: torch.device) -> None:
        memories = [torch.zeros(n, dtype=dtype, device=device) for dtype, n in self._rows.sizes.items()]
        parameters = table.parameters
        pointers: dict[int, int] = {}
        for index, place in self._places.items():
            view = place.view(memories[place.row])
            view.copy_(parameters[index].data)
            parameters[index].data = view
            pointers[index] = view.data_ptr()
        self._memories.append(memories)
        self._pointers.append(pointers)

    def _runs(self, indices: Sequence[int]) -> list[list[int]]:
        """Indices whose places lie one behind the other, together."""
        last: dict[int, list[int]] = {}
        runs: list[list[int]] = []
        for index in indices:
            place = self._places[index]
            run = last.get(place.row)
            if run is None or self._places[run[-1]].stop != place.start:
                run = last[place.row] = []
                runs.append(run)
            run.append(index)
        return runs


def is_elsewhere(now: State, then: State) -> bool:
    """Whether a tensor is another object, or lies at another address."""
    return now[0] is not then[0] or now[2] != then[2]


def _is_other(now: State, then: State | None) -> bool:
    return then is None or now[1] != then[1] or is_elsewhere(now, then)


def _memory(tensor: Tensor) -> tuple[torch.device, int] | int:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()
