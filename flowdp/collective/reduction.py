"""Sums, means and extremes of equal tensors, written back to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flowdp.collective.base import BLOCK, CUDA_BLOCK, add_weighted, arithmetic

__all__ = ["Op", "flat_view", "reduce_all"]

Op = Literal["sum", "mean", "max", "min"]


def flat_view(tensor: Tensor) -> Tensor:
    """What a tensor holds, as real numbers in one row, outside of any graph.

    Returns:
        A view, or a copy where the tensor is not contiguous. Shape (elements,).
    """
    plain = tensor.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.contiguous().view(-1)


def reduce_all(tensors: Sequence[Tensor], op: Op, shares: Sequence[float] | None = None) -> None:
    """Replace each tensor by the reduction of all, block by block, while a block is in the cache.

    Terms are added in the order of the tensors, float16 and bfloat16 in float32; all get the same bits.

    Args:
        tensors: Of one dtype, on the device of the first or elsewhere. Shape (elements,) each.
        op: What to compute.
        shares: With "sum": what each tensor is multiplied by. One with 0.0 is left out, not multiplied,
            for 0 times NaN is NaN. Not all are 0.

    Streams: everything is enqueued on the current one of the first tensor's device. A copy between two
        devices is ordered by torch with the current streams of both.
    """
    first = tensors[0]
    size = CUDA_BLOCK if first.is_cuda else BLOCK * torch.get_num_threads()
    for blocks in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        _reduce(blocks, op, shares)


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
