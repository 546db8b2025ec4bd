"""Gradients and buffers on their way between machines: flat, in the host's memory."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowdp.device.copies import carry
from flowdp.network.machines import Machines
from flowdp.options import Payload

__all__ = ["GradientMemory", "average_over_machines", "spread"]

HOST = torch.device("cpu")


class _Memory:
    """Flat memory for gradients of one dtype of the way, with a view for each.

    Args:
        shapes: Shapes of the gradients.
        is_complex: Whether they are complex: each number then is two.
        dtype: Dtype of the sums.
        wire: Dtype on the way.
        device: Device of the gradients.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        is_complex: bool,
        dtype: torch.dtype,
        wire: torch.dtype,
        device: torch.device,
    ) -> None:
        counts = [shape.numel() * (2 if is_complex else 1) for shape in shapes]
        self.flat = torch.zeros(sum(counts), dtype=dtype, device=device)
        self.views = [
            torch.view_as_complex(part.view(*shape, 2)) if is_complex else part.view(shape)
            for part, shape in zip(self.flat.split(counts), shapes, strict=True)
        ]
        self._wire = wire

    def sendable(self) -> Tensor:
        """The memory as it travels: itself, where nothing has to change."""
        return self.flat.to(HOST, self._wire)

    def take(self, summed: Tensor, total: int) -> None:
        """Take the sum over the machines, divided by a number."""
        if summed is not self.flat:
            self.flat.copy_(summed)
        self.flat.div_(total)


class GradientMemory:
    """Places of the gradients of some parameters in flat memory.

    Args:
        named: The parameters, by name.
        payload: As given to `setup`.

    Attributes:
        names: In order.
        parameters: In order.
        checksum: Of their names and forms; the same on all machines, or they cannot be summed.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], payload: Payload) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        forms = [(name, str(one.dtype), tuple(one.shape)) for name, one in named]
        self.checksum = zlib.crc32(repr(forms).encode())
        groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for place, one in enumerate(self.parameters):
            groups.setdefault((_sum_dtype(one.dtype), one.is_complex()), []).append(place)
        self._groups = list(groups.values())
        self._memories = [
            _Memory(
                [self.parameters[place].shape for place in group],
                is_complex,
                dtype,
                torch.bfloat16 if payload == "bf16" and dtype is torch.float32 else dtype,
                self.parameters[group[0]].device,
            )
            for (dtype, is_complex), group in groups.items()
        ]

    def clear(self) -> None:
        """Bring no gradient."""
        for memory in self._memories:
            memory.flat.zero_()

    def pack(self, factor: int) -> None:
        """Put the gradients into the memory, times a factor."""
        for memory, group in zip(self._memories, self._groups, strict=True):
            own = [self.parameters[place].grad for place in group]
            missing = [view for view, grad in zip(memory.views, own, strict=True) if grad is None]
            if missing:
                torch._foreach_zero_(missing)
            present = [view for view, grad in zip(memory.views, own, strict=True) if grad is not None]
            if present:
                torch._foreach_copy_(present, [grad for grad in own if grad is not None])
            memory.flat.mul_(factor)

    def sendable(self) -> list[Tensor]:
        """The memory as it travels, on the host; the memory itself, where nothing has to change."""
        return [memory.sendable() for memory in self._memories]

    def unpack(self, sums: Sequence[Tensor], total: int, is_there: Sequence[bool]) -> None:
        """Write sums over the machines, divided by a number, into the gradients.

        Args:
            sums: What has become of `sendable()`.
            total: The number.
            is_there: Per parameter, whether any machine has a gradient; else it stays None.
        """
        for memory, summed in zip(self._memories, sums, strict=True):
            memory.take(summed, total)
        for memory, group in zip(self._memories, self._groups, strict=True):
            targets, sources = [], []
            for place, view in zip(group, memory.views, strict=True):
                if not is_there[place]:
                    continue
                parameter = self.parameters[place]
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                targets.append(parameter.grad)
                sources.append(view)
            if targets:
                torch._foreach_copy_(targets, sources)


@torch.no_grad()
def spread(machines: Machines, tensors: Sequence[Tensor]) -> None:
    """Replace tensors on any devices by machine 0's, one message for each dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor.detach())
    # Bytes: gloo does not know every dtype.
    flats = [
        torch.cat([one.reshape(-1).view(torch.uint8) for one in carry(group, HOST)])
        for group in groups.values()
    ]
    machines.spread(flats)
    if machines.leads:
        return
    for (dtype, group), flat in zip(groups.items(), flats, strict=True):
        parts = flat.split([one.numel() * one.element_size() for one in group])
        for own, part in zip(group, parts, strict=True):
            own.copy_(part.clone().view(dtype).view(own.shape))


@torch.no_grad()
def average_over_machines(machines: Machines, tensors: Sequence[Tensor], weight: int) -> None:
    """Replace tensors on any devices by their weighted mean over machines, integers and flags by the maximum.

    Args:
        machines: All of them.
        tensors: Of the same shapes and dtypes on all machines.
        weight: Weight of this machine's; all together must not be 0.
    """
    floats = [one for one in tensors if one.is_floating_point() or one.is_complex()]
    others = [one for one in tensors if not (one.is_floating_point() or one.is_complex())]
    parts = [_real(one).to(HOST, torch.float64).reshape(-1) for one in floats]
    sums = torch.cat([torch.ones(1, dtype=torch.float64), *parts]) * weight
    peaks = [one.to(HOST, torch.int64).reshape(-1) for one in others]
    most = torch.cat([torch.zeros(1, dtype=torch.int64), *peaks])
    machines.reduce([sums, most], ["sum", "max"])
    means = (sums[1:] / sums[0]).split([one.numel() for one in parts])
    for own, mean in zip(floats, means, strict=True):
        _real(own).copy_(mean.view(_real(own).shape))
    for own, peak in zip(others, most[1:].split([one.numel() for one in others]), strict=True):
        own.copy_(peak.view(own.shape))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: of 16 bits, and of smaller ones, they are float32."""
    real = dtype.to_real()
    return real if real in (torch.float32, torch.float64) else torch.float32


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
