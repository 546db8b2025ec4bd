"""Gradients of the ranks, and their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

__all__ = [
    "Gradients",
    "accumulate",
    "add_up",
    "has_hooks",
    "without_hooks",
]

Gradients = list[Tensor | None]


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
