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
    """Replace each tensor by the reduction of all, block by block, while a block is in the cache.

    Terms are added in the order of the tensors, float16 and bfloat16 in float32; all get the same bits.

    Args:
        tensors: Tensors of one dtype, on the device of the first or on others. Shape (elements,) each.
        op: Operation.
        shares: With "sum": factor of each tensor. A tensor with 0.0 is left out instead of multiplied, as
            0 times NaN is NaN. At least one is not 0.

    Streams: all work is enqueued on the current stream of the first tensor's device. Torch orders a copy
        between two devices with the current streams of both.
    """
    first = tensors[0]
    size = CUDA_BLOCK if is_accelerator(first.device) else BLOCK * torch.get_num_threads()
    for blocks in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        _reduce(blocks, op, shares)


def split_equally(flats: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Split tensors of one shape at the same places into pieces for threads, or kernels, that share the work.

    Returns:
        For each piece its views of all tensors. On the CPU a piece has eight blocks, as handing one to a
        thread takes longer than to reduce a block; on CUDA it has one.
    """
    size = CUDA_BLOCK if is_accelerator(flats[0].device) else 8 * BLOCK
    return list(zip(*(flat.split(size) for flat in flats), strict=True))


def _reduce(blocks: Sequence[Tensor], op: Op, shares: Sequence[float] | None) -> None:
    givers = range(len(blocks)) if shares is None else [at for at, share in enumerate(shares) if share]
    total = blocks[givers[0]].to(blocks[0].device)
    if op in ("max", "min"):
        extreme = torch.maximum if op == "max" else torch.minimum
        for giver in givers[1:]:
            extreme(total, blocks[giver].to(total.device), out=total)
    else:
        if total.dtype.is_floating_point:
            total = total.to(arithmetic(total.dtype))
        others = (blocks[giver].to(total.device) for giver in givers[1:])
        if shares is not None:
            add_weighted(total, others, [shares[giver] for giver in givers])
        else:
            for other in others:
                total.add_(other)
        if op == "mean":
            total.div_(len(blocks))
    for block in blocks:
        if block is not total:
            block.copy_(total)
