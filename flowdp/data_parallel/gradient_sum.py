"""Gradients of the ranks on their way to the first device, and their sum.

Between several CUDA devices NCCL carries them: gradients are put into a row on each device, summed by one
reduction, and come out as views of the first device's row. What has no place in a row is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from flowdp.collective.nccl_loop import NcclLoop, Rows, rows_like
from flowdp.device.copies import carry

__all__ = [
    "GradientSum",
    "Gradients",
    "Packed",
    "accumulate",
    "add_up",
    "has_hooks",
    "without_hooks",
]

Gradients = list[Tensor | None]


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


class GradientSum:
    """Sums gradients on the first device.

    Args:
        tensors: Tensors of the first rank; their gradients are summed.
        home: The first device.
        loop: NCCL, which reduces the ranks' rows in place, and needs gradients of all ranks; None: each rank
            copies its own to the first device.
    """

    def __init__(self, tensors: Sequence[Tensor], home: torch.device, loop: NcclLoop | None) -> None:
        self._tensors = tensors
        self._home = home
        self._loop = loop

    def pack(self, gradients: Gradients, device: torch.device) -> Packed:
        """Put a rank's gradients into rows, or bring them to the first device.

        Streams:
            The current ones of both devices.
        """
        if self._loop is None:
            return Packed(None, [], carry(gradients, self._home))
        (rows,) = rows_like(self._tensors, [device])
        has = rows.fill(gradients)
        rest = [None if is_in else gradient for is_in, gradient in zip(has, gradients, strict=True)]
        return Packed(rows, has, carry(rest, self._home))

    def sum(self, ranks: Sequence[Packed]) -> Gradients:
        """The sums over all ranks, on the first device; None where none has a gradient.

        They are summed rank after rank, or in the order of NCCL.

        Raises:
            CollectiveError: NCCL fails.

        Streams:
            The caller's current ones of all devices.
        """
        if self._loop is None:
            return add_up([rank.rest for rank in ranks])
        is_there = [any(column) for column in zip(*(rank.has for rank in ranks), strict=True)]
        sums: Gradients = [None] * len(is_there)
        rows = [rank.rows for rank in ranks if rank.rows is not None]
        if any(is_there):
            self._loop.reduce([rank_rows.memories for rank_rows in rows])
            sums = [view if has else None for view, has in zip(rows[0].views, is_there, strict=True)]
        return add_up([sums, *(rank.rest for rank in ranks if any(t is not None for t in rank.rest))])


@torch.no_grad()
def add_up(ranks: Sequence[Gradients]) -> Gradients:
    """The sum over the ranks, in their order; None where no rank has a gradient.

    Args:
        ranks: Gradients of the same parameters, on one device. Shape (ranks, parameters). They stay as they
            are: autograd may share or expand them.
    """
    total = list(ranks[0])
    for gradients in ranks[1:]:
        both: list[tuple[int, Tensor, Tensor]] = []
        for place, (known, more) in enumerate(zip(total, gradients, strict=True)):
            if known is None:
                total[place] = more
            elif more is not None:
                both.append((place, known, more))
        if not both:
            continue
        sums = torch._foreach_add([known for _, known, _ in both], [more for _, _, more in both])
        for (place, _, _), summed in zip(both, sums, strict=True):
            total[place] = summed
    return total


def accumulate(parameters: Sequence[Tensor], gradients: Gradients) -> None:
    """Add gradients to leaves on the same device, as a backward would: hooks see them."""
    given = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    if given:
        # `torch.autograd.backward` without its look at each shape, which takes longer than the rest.
        Variable._execution_engine.run_backward(
            tuple(p for p, _ in given), tuple(g for _, g in given),
            False, False, (), allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip


@contextmanager
def without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hold back the hooks of tensors, in a part of a sum on which they shall run."""
    held = [(hooks, dict(hooks)) for hooks in _hooks_of(tensors)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


def has_hooks(tensors: Sequence[Tensor]) -> bool:
    """Whether any of the tensors has hooks that run in a backward."""
    return any(True for _ in _hooks_of(tensors))


def _hooks_of(tensors: Sequence[Tensor]) -> Iterator[dict[Any, Any]]:
    for tensor in tensors:
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            if hooks:
                yield hooks
