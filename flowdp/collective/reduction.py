"""Sum, mean, maximum and minimum of tensors of one shape, written to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flowdp.collective.base import BLOCK, CUDA_BLOCK, add_weighted, arithmetic
from flowdp.device.accelerator import is_accelerator

__all__ = ["Op", "flat_view", "reduce_all", "split_equally", "write_back"]

Op = Literal["sum", "mean", "max", "min"]


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a tensor as real numbers in one dimension, detached from any graph.

    Returns:
        A view, or a copy where the tensor is not contiguous. Shape (elements,).
    """
    plain = tensor.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.contiguous().view(-1)


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy the elements of a tensor's `flat_view` to the tensor, where the view is a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        real.copy_(flat.view(real.shape))


def reduce_all(tensors: Sequence[Tensor], op: Op, shares: Sequence[float] | None = None) -> None:
    """Replace each tensor by the reduction of all.

    Terms are added in the order of the tensors, float16 and bfloat16 in float32; all get the same bits.

    Args:
        tensors: Tensors of one dtype, on the device of the first or on others. Shape (elements,) each.
        op: Operation.
        shares: With "sum": factor of each tensor. A tensor with 0.0 is left out instead of multiplied, as
            0 times NaN is NaN. At least one is not 0.

    Streams: all work is enqueued on the current stream of the first tensor's device. Torch orders a copy
        between two devices with the current streams of both.
    """
    givers = [at for at in range(len(tensors)) if shares is None or shares[at]]
    first, *others = (tensors[giver].to(tensors[0].device) for giver in givers)
    is_sum = op in ("sum", "mean")
    total = first.to(arithmetic(first.dtype)) if is_sum and first.is_floating_point() else first
    if not is_sum:
        for other in others:
            (torch.maximum if op == "max" else torch.minimum)(total, other, out=total)
    elif shares is None:
        for other in others:
            total.add_(other)
    else:
        add_weighted(total, others, [shares[giver] for giver in givers])
    if op == "mean":
        total.div_(len(tensors))
    for tensor in tensors:
        if tensor is not total:
            tensor.copy_(total)


def split_equally(flats: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Split tensors of one shape at the same places into pieces for threads, or kernels, that share the work.

    Returns:
        For each piece its views of all tensors. On the CPU the pieces of two ranks stay in the cache, and
        handing one to a thread does not take longer than to reduce it.
    """
    size = CUDA_BLOCK if is_accelerator(flats[0].device) else 2 * BLOCK * torch.get_num_threads()
    return list(zip(*(flat.split(size) for flat in flats), strict=True))
