"""Gradients and buffers on their way between machines: flat, in the host's memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flowdp.collective.rows import PackedRows
from flowdp.device.copies import carry
from flowdp.errors import FlowdpError
from flowdp.network.machines import Machines
from flowdp.options import Payload

__all__ = ["GradientMemory", "average_over_machines", "spread"]

HOST = torch.device("cpu")


class GradientMemory:
    """Places of the gradients of some parameters in one row of memory for each dtype.

    Args:
        named: The parameters, by name; all on one device.
        payload: As given to `setup`.

    Attributes:
        parameters: In order.
        checksum: Of their names and places; the same on all machines, or they cannot be summed.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], payload: Payload) -> None:
        self.parameters = list(named.values())
        self._names = list(named)
        packed = PackedRows(self.parameters, {one.dtype.to_real() for one in self.parameters})
        self.checksum = zlib.crc32(repr([*zip(self._names, packed.places, strict=True)]).encode())
        self._device = self.parameters[0].device if self.parameters else HOST
        self._rows = [
            torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in packed.sizes.items()
        ]
        self._views = packed.views(self._rows)
        self._is_narrow = payload == "bf16"

    def pack(self, factor: int) -> list[Tensor]:
        """The gradients times a factor, as they travel: on the host, zero where there is none.

        Raises:
            FlowdpError: One has a graph, or is sparse.
        """
        missing, targets, sources = [], [], []
        for name, parameter, view in zip(self._names, self.parameters, self._views, strict=True):
            grad = parameter.grad
            if view is None:  # it has no elements
                continue
            if grad is None:
                missing.append(view)
                continue
            if grad.requires_grad or grad.layout is not torch.strided:
                kind = "a graph (create_graph=True)" if grad.requires_grad else "a sparse layout"
                raise FlowdpError(
                    f"the gradient of {name!r} has {kind}, and cannot be summed over machines: take "
                    "gradients with a graph by torch.autograd.grad(), and make embeddings with sparse=False"
                )
            targets.append(view)
            sources.append(grad)
        if missing:
            torch._foreach_zero_(missing)
        if targets:
            torch._foreach_copy_(targets, sources)
        sent = []
        for row in self._rows:
            wide = row.to(_sum_dtype(row.dtype)).mul_(factor)
            is_narrow = self._is_narrow and wide.dtype is torch.float32
            sent.append(wide.to(HOST, torch.bfloat16 if is_narrow else wide.dtype))
        return sent

    def unpack(self, sums: Sequence[Tensor], total: float, is_there: Sequence[bool]) -> None:
        """Write sums over the machines, divided by a number, into the gradients.

        Args:
            sums: What has become of the rows that travelled.
            total: The number.
            is_there: Per parameter, whether any machine has a gradient; else it stays None.
        """
        for row, summed in zip(self._rows, sums, strict=True):
            row.copy_(summed.to(self._device, _sum_dtype(row.dtype)).div_(total))
        targets, sources = [], []
        for parameter, view, has in zip(self.parameters, self._views, is_there, strict=True):
            if not has or view is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            targets.append(parameter.grad)
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)


@torch.no_grad()
def spread(machines: Machines, tensors: Sequence[Tensor]) -> None:
    """Replace tensors on any devices by machine 0's, in one message."""
    own = [one.detach() for one in tensors if one.numel()]
    # Bytes: gloo does not know every dtype.
    parts = [one.reshape(-1).view(torch.uint8) for one in carry(own, HOST)]
    if not parts:
        return
    flat = torch.cat(parts)
    machines.spread([flat])
    if not machines.leads:
        for one, part in zip(own, flat.split([len(part) for part in parts]), strict=True):
            one.copy_(part.clone().view(one.dtype).view(one.shape))  # a clone is aligned


@torch.no_grad()
def average_over_machines(machines: Machines, tensors: Sequence[Tensor], weight: int) -> None:
    """Replace tensors on any devices by their weighted mean over machines, integers and flags by the maximum.

    Args:
        machines: All of them.
        tensors: Of the same shapes and dtypes on all machines.
        weight: Weight of this machine's; all together must not be 0.
    """
    reals = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    floats = [one for one in reals if one.is_floating_point()]
    counts = [one for one in reals if not one.is_floating_point()]
    sums = torch.cat([torch.ones(1, dtype=torch.float64), *_flat(floats, torch.float64)]) * weight
    peaks = torch.cat([torch.zeros(1, dtype=torch.int64), *_flat(counts, torch.int64)])
    machines.reduce([sums, peaks], ["sum", "max"])
    for group, flat in ((floats, sums[1:] / sums[0]), (counts, peaks[1:])):
        for own, part in zip(group, flat.split([one.numel() for one in group]), strict=True):
            own.copy_(part.view(own.shape))


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [one.to(HOST, dtype).reshape(-1) for one in tensors]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: of 16 bits, and of smaller ones, they are float32."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
